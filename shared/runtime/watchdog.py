"""Who has been silent for too long, as a pure policy: it says whom to kill, the supervisor does it.

ready --WATCHDOG=1...--> ... --nothing for `timeout_s`, or WATCHDOG=trigger--> overdue, said once

A process says WATCHDOG=1 only while its work makes progress. Times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

LATE_S: Final = 1.0
"""Who looks this much later than it meant to was itself away (stopped, or starved): nobody heard of meanwhile is to
blame for that."""


class Watchdog:
    """Of processes, by pid."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s: dict[int, float] = {}
        self._triggered: set[int] = set()
        self._told: set[int] = set()
        self._looked_s: float | None = None

    def heard(self, pid: int, now_s: float) -> None:
        """It makes progress."""
        self._heard_s[pid] = now_s

    def trigger(self, pid: int) -> None:
        """It says of itself that it makes none."""
        self._triggered.add(pid)

    def overdue(self, now_s: float, watched: Collection[int]) -> list[int]:
        """Who is to be killed now. `watched` are all that are ready and not reaped; the others are forgotten."""
        deadline_s, looked_s = self.deadline_s, self._looked_s
        away_s = 0.0
        if deadline_s is not None and looked_s is not None and now_s > deadline_s + LATE_S:
            away_s = now_s - looked_s
        self._looked_s = now_s
        # who is new is given the whole time; who has been heard just now, no more than that
        self._heard_s = {pid: min(now_s, self._heard_s.get(pid, now_s) + away_s) for pid in watched}
        self._triggered.intersection_update(watched)
        self._told.intersection_update(watched)
        late = {pid for pid, heard_s in self._heard_s.items() if now_s - heard_s >= self._timeout_s}
        again = [pid for pid in watched if pid in late | self._triggered and pid not in self._told]
        self._told.update(again)
        return again

    @property
    def deadline_s(self) -> float | None:
        """When somebody may be overdue next."""
        pending = [heard_s for pid, heard_s in self._heard_s.items() if pid not in self._told]
        return min(pending) + self._timeout_s if pending else None
