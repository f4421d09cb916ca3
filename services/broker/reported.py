"""What an instance has said of itself, and what a report makes known. Pure.

serving --> draining --nothing is in flight--> drained --> serving
    `------------`------------------------------`--> leaving: it stops
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from stagemesh.shared.bus.events import Detail, EventKind
from stagemesh.shared.codec.mesh import progress_from_pb
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.pb import broker_pb2

Told = tuple[EventKind, Mapping[str, Detail]]


class Condition(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    LEAVING = "leaving"


@dataclass(slots=True)
class Reported:
    """Times are CLOCK_MONOTONIC in seconds."""

    joined_s: float
    last_s: float
    worked_s: float  # when it had something to do, last
    state: Condition = Condition.SERVING
    progress: tuple[StageProgress, ...] = ()
    retractions: int = 0

    def take(self, report: broker_pb2.InstanceReport, now_s: float) -> Iterator[Told]:
        """The events that follow."""
        first, before, known = self.last_s == self.joined_s, self.state, self.retractions
        self.last_s, self.state = now_s, _state(report)
        self.worked_s = now_s if report.has_work else self.worked_s
        self.progress = tuple(map(progress_from_pb, report.progress))
        self.retractions = report.info.load.retractions
        if self.retractions > known and not first:
            yield EventKind.RETRACTED, {"sequences": self.retractions - known}
        if self.state is not before and (kind := _NEWS.get(self.state)) is not None:
            yield kind, {}


def _state(report: broker_pb2.InstanceReport) -> Condition:
    if report.leaving:
        return Condition.LEAVING
    if report.info.accepting:
        return Condition.SERVING
    return Condition.DRAINING if report.has_work else Condition.DRAINED


_NEWS: Mapping[Condition, EventKind] = {
    Condition.SERVING: EventKind.RESUMED,
    Condition.DRAINING: EventKind.DRAINING,
    Condition.DRAINED: EventKind.DRAINED,
}
