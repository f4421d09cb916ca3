"""What a whole mesh waits for: the entries of its processes put together, and shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from stagemesh.shared.obs.entry import Entry, oldest_first


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """What one process has said, or why it has not."""

    name: str
    address: str
    entries: tuple[Entry, ...] = ()
    error: str = ""


def by_process_kind(name: str) -> tuple[int, str]:
    """The order of sections: router, broker, then the stages by name."""
    return {"router": 0, "broker": 1}.get(name, 2), name


def waiting_for(process: ProcessDump, dumps: Iterable[ProcessDump]) -> Mapping[str, int]:
    """How many entries of each kind, in other processes, wait for `process` or for its instance."""
    names = {process.name, process.name.partition("/")[0], process.address}
    others = [entry for dump in dumps if dump.name != process.name for entry in dump.entries]
    return Counter(entry.kind for entry in others if not names.isdisjoint(entry.on))


def dump_text(dumps: Iterable[ProcessDump]) -> str:
    """A section a process, a line an entry, the oldest first. Those that do not answer come first."""
    ordered = sorted(dumps, key=lambda dump: (not dump.error, by_process_kind(dump.name)))
    lines = []
    for dump in ordered:
        if dump.error:
            waiting = ", ".join(f"{count} {kind}" for kind, count in sorted(waiting_for(dump, ordered).items()))
            lines.append(f"{dump.name}  does not answer: {dump.error}")
            lines.append(f"           what waits for it, or for its instance: {waiting or 'nothing that is known'}")
        else:
            lines.append(f"{dump.name}" + ("" if dump.entries else "  nothing"))
            lines += [entry.text() for entry in oldest_first(dump.entries)]
    return "\n".join(lines)


def dump_json(dumps: Iterable[ProcessDump]) -> dict[str, Any]:
    """By process name: its address, and its entries or the error."""
    ordered = sorted(dumps, key=lambda dump: by_process_kind(dump.name))
    document: dict[str, Any] = {dump.name: msgspec.to_builtins(dump) for dump in ordered}
    return document
