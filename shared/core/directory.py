"""What instances say about themselves, and the directory made of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.layers import LayerRange

PROTOCOL_VERSION = 1


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What a peer needs to write into a region: the name of the endpoint that owns it and the region's bounds there,
    in bytes."""

    endpoint: str
    address: int
    length: int

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length


@dataclass(frozen=True, slots=True)
class StageInfo:
    pp_rank: int
    layers: LayerRange
    address: str
    pool: RegionKey


@dataclass(frozen=True, slots=True)
class Manifest:
    """What two instances must agree on before they are paired; num_pages and max_context may differ."""

    protocol_version: int
    fingerprint: str
    dtype: str
    page_size: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    transfer_backend: str
    num_pages: int
    max_context: int

    @property
    def max_request_tokens(self) -> int:
        """Prompt and new tokens of the largest request that its pool can ever hold."""
        return min(self.max_context, self.num_pages * self.page_size)


_PAIRED = (
    "protocol_version",
    "fingerprint",
    "dtype",
    "page_size",
    "num_kv_heads",
    "head_dim",
    "num_layers",
    "transfer_backend",
)


def mismatch(one: Manifest, other: Manifest) -> str | None:
    """The first field that forbids the pair, with both values, or None."""
    for name in _PAIRED:
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            return f"{name}: {mine!r} against {theirs!r}"
    return None


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """`retractions` counts from the start of the instance, those that ended in a recomputation too."""

    waiting: int = 0
    running: int = 0
    pages_free: int = 0
    waiting_tokens: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    ref: InstanceRef
    role: Role
    address: str
    manifest: Manifest
    stages: tuple[StageInfo, ...]
    load: InstanceLoad = InstanceLoad()
    accepting: bool = True

    @property
    def widest_page_bytes(self) -> int:
        """Of a page on the stage where it is largest."""
        return max(stage.pool.length for stage in self.stages) // self.manifest.num_pages
