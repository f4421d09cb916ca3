"""The directory of instances. Pure: the service feeds in what heads report, and sends on what has changed.

report --> joined --report...--> (leaving) --end of stream--> gone
A report of an older epoch than the one that is known is stale; a newer one replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef


@dataclass(frozen=True, slots=True)
class Change:
    """To be told to everybody who watches."""

    changed: tuple[InstanceInfo, ...] = ()
    removed: tuple[InstanceRef, ...] = ()


class Directory:
    """By name, one epoch each."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceInfo] = {}

    def __iter__(self) -> Iterator[InstanceInfo]:
        return iter(self._instances.values())

    def get(self, ref: InstanceRef) -> InstanceInfo | None:
        """The instance if this very epoch of it is here."""
        info = self._instances.get(ref.name)
        return info if info is not None and info.ref == ref else None

    def report(self, info: InstanceInfo) -> Change | None:
        """Takes a report in. None if it is of an epoch that has been replaced."""
        known = self._instances.get(info.ref.name)
        if known is not None and known.ref.epoch > info.ref.epoch:
            return None
        self._instances[info.ref.name] = info
        replaced = () if known is None or known.ref == info.ref else (known.ref,)
        return Change((info,), replaced)

    def remove(self, ref: InstanceRef) -> Change | None:
        """It has left or is lost. None if it is not here (any more)."""
        if self.get(ref) is None:
            return None
        del self._instances[ref.name]
        return Change(removed=(ref,))


def flaw(info: InstanceInfo) -> str | None:
    """What is wrong with an instance's description of itself, or None: routers and heads rely on it."""
    manifest, ends = info.manifest, [0, *(stage.layers.hi for stage in info.stages)]
    if not info.ref.name or not info.address:
        return "it has no name or no address"
    if min(manifest.page_size, manifest.num_pages, manifest.num_layers, manifest.max_context) < 1:
        return "its manifest has a size below 1"
    if [stage.layers.lo for stage in info.stages] != ends[:-1] or ends[-1] != manifest.num_layers:
        return f"its stages do not cover {manifest.num_layers} layers, one after the other"
    return None
