"""A line of a dump: something in a process that is not over, and what it waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from stagemesh.shared.errors import ProtocolViolation

Detail = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Entry:
    """`on` are the processes (`decode-0/1`), instances (`decode-0`) or addresses that it waits for, as far as its own
    process knows. `age_s` counts from its start; details that are ages count from then."""

    kind: str
    name: str
    age_s: float
    state: str = ""
    waits_for: str = ""
    on: tuple[str, ...] = ()
    details: Mapping[str, Detail] = field(default_factory=dict)

    def text(self) -> str:
        """One line, for people."""
        state = f", {self.state}" if self.state else ""
        waits = f", waits for {self.waits_for}" if self.waits_for else ""
        on = f" [{', '.join(self.on)}]" if self.on else ""
        details = "".join(f" {key}={value}" for key, value in self.details.items())
        return f"{self.age_s:9.3f} s  {self.kind} {self.name}{state}{waits}{on}{' ' if details else ''}{details}"


def oldest_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry.age_s)


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """A JSON array, oldest first."""
    rounded = [dataclasses.replace(entry, age_s=round(entry.age_s, 6)) for entry in entries]
    return msgspec.json.encode(oldest_first(rounded))


def decode_entries(data: bytes) -> list[Entry]:
    """Raises ProtocolViolation for what is no array of entries."""
    try:
        return msgspec.json.decode(data, type=list[Entry])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no array of entries: {error}") from None
