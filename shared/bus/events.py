"""What happens in a mesh, as JSON on the bus, for people and tools: the broker says it, as it sees it. Nothing waits
for it, and nothing is decided by it.

    stagemesh.events.<mesh>.<name>      `name` is an instance, or `broker`

`seq` counts up by one from an event to the next of the same broker, those that were dropped too: who sees a gap has
missed some.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from enum import Enum
from typing import Final

import msgspec

from stagemesh.shared.bus.base import Bus
from stagemesh.shared.errors import ProtocolViolation

MAX_RECENT: Final = 256
MAX_EARLY: Final = 256
Detail = str | int | float | bool


class EventKind(Enum):
    UP = "up"  # the broker
    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"
    DRAINING = "draining"
    DRAINED = "drained"
    RESUMED = "resumed"
    ROLE_SWITCHED = "role_switched"
    RETRACTED = "retracted"
    TICKET_FAILED = "ticket_failed"
    RENEWING = "renewing"  # an instance is told to end and be started again: only that frees pages that it has in doubt
    CHANGED = "changed"  # by an operator: a setting, a cache, a request


class MeshEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s` is Unix time. `source` is the start of the broker that `seq` belongs to."""

    event: EventKind
    mesh: str
    name: str
    seq: int
    source: str
    at_s: float
    details: dict[str, Detail] = {}


def events_subject(mesh: str, name: str) -> str:
    return f"stagemesh.events.{mesh}.{name}"


class Events:
    """Says them on the bus, once there is one, and keeps the last ones."""

    def __init__(self, mesh: str, source: str) -> None:
        self._mesh, self._source = mesh, source
        self._bus: Bus | None = None
        self._early: deque[MeshEvent] = deque()
        self._num_lost = self._seq = 0
        self.recent: deque[MeshEvent] = deque(maxlen=MAX_RECENT)
        self.by_kind: Counter[EventKind] = Counter()

    def attach(self, bus: Bus | None) -> None:
        """From now on events go there, first those that have waited. None: there is no server."""
        if self._bus is not None:
            self._num_lost += self._bus.stats.num_dropped
        self._bus = bus
        while bus is not None and self._early:
            self._publish(bus, self._early.popleft())

    def say(self, event: EventKind, name: str, **details: Detail) -> None:
        """Never waits. What finds no room is dropped and counted."""
        self._seq += 1
        said = MeshEvent(
            event=event,
            mesh=self._mesh,
            name=name,
            seq=self._seq,
            source=self._source,
            at_s=round(time.time(), 3),
            details=details,
        )
        self.recent.append(said)
        self.by_kind[event] += 1
        if self._bus is not None:
            self._publish(self._bus, said)
        elif len(self._early) < MAX_EARLY:
            self._early.append(said)
        else:
            self._num_lost += 1

    @property
    def num_dropped(self) -> int:
        """Never sent. The bus counts what else its process has published, which is nothing here."""
        return self._num_lost + (0 if self._bus is None else self._bus.stats.num_dropped)

    def _publish(self, bus: Bus, said: MeshEvent) -> None:
        bus.publish(events_subject(self._mesh, said.name), msgspec.json.encode(said))


def read_event(payload: bytes) -> MeshEvent:
    """Raises ProtocolViolation for anything else."""
    try:
        return msgspec.json.decode(payload, type=MeshEvent)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no event: {error}") from None


class Gaps:
    """Counts the events that a subscriber has missed. One that missed the first of a broker does not know of them."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self.num_missed = 0

    def note(self, event: MeshEvent) -> int:
        """How many are missing before this one."""
        last = self._last.get(event.source, event.seq - 1)
        self._last = {event.source: event.seq}  # of the broker that speaks now
        missed = max(0, event.seq - last - 1)
        self.num_missed += missed
        return missed
