"""Who has shown no sign for too long, as a pure policy: it says whom to kill, the supervisor does it.

watched --a sign...--> ... --none for `timeout_s`, or told so--> overdue, said once

What a sign is, the owner decides: a process says WATCHDOG=1 only while its work makes progress. Times are seconds of
one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

LATE_S: Final = 1.0
"""Who looks this much later than it meant to was itself away (stopped, or starved): nobody heard of meanwhile is to
blame for that."""
STARVED_TIMES: Final = 5
"""What waits for a core is slow, not hung, so that time does not count; but silence of so many timeouts is one anyhow:
a loop that spins waits for its core too, on a busy host."""


def never_waits(pid: int) -> float:
    return 0.0


class Watchdog:
    """Of processes, by pid. `waited_s` gives the seconds that one's threads have waited for a core, in all."""

    def __init__(self, timeout_s: float, waited_s: Callable[[int], float] = never_waits) -> None:
        self._timeout_s, self._waited_s = timeout_s, waited_s
        self._heard_s: dict[int, float] = {}
        self._waited_before_s: dict[int, float] = {}  # when it was heard
        self._excused_s: dict[int, float] = {}  # since then
        self._triggered: set[int] = set()
        self._told: set[int] = set()
        self._looked_s: float | None = None

    def heard(self, pid: int, now_s: float) -> None:
        """A sign of it."""
        self._heard_s[pid] = now_s
        self._waited_before_s[pid] = self._waited_s(pid)
        self._excused_s.pop(pid, None)

    def trigger(self, pid: int) -> None:
        """It is overdue whatever the time is: it says so of itself, or nobody can wait for it."""
        self._triggered.add(pid)

    def overdue(self, now_s: float, watched: Collection[int]) -> list[int]:
        """Who is to be killed now. `watched` are to give signs and are not reaped; the others are forgotten."""
        deadline_s, looked_s = self.deadline_s, self._looked_s
        away_s = 0.0
        if deadline_s is not None and looked_s is not None and now_s > deadline_s + LATE_S:
            away_s = now_s - looked_s
        self._looked_s = now_s
        self._follow(watched, now_s, away_s)
        late = {pid for pid in watched if self._is_late(pid, now_s)}
        again = [pid for pid in watched if pid in late | self._triggered and pid not in self._told]
        self._told.update(again)
        return again

    def _follow(self, watched: Collection[int], now_s: float, away_s: float) -> None:
        for pid in watched:
            if pid not in self._heard_s:  # who is new is given the whole time
                self.heard(pid, now_s)
        # who has been heard just now is given no more than that
        self._heard_s = {pid: min(now_s, self._heard_s[pid] + away_s) for pid in watched}
        self._waited_before_s = {pid: self._waited_before_s[pid] for pid in watched}
        self._excused_s = {pid: excused_s for pid, excused_s in self._excused_s.items() if pid in self._heard_s}
        self._triggered.intersection_update(watched)
        self._told.intersection_update(watched)

    def _is_late(self, pid: int, now_s: float) -> bool:
        silent_s = now_s - self._heard_s[pid]
        if silent_s < self._timeout_s or pid in self._told:
            return False
        waited_s = max(0.0, self._waited_s(pid) - self._waited_before_s[pid])
        self._excused_s[pid] = min(waited_s, silent_s, (STARVED_TIMES - 1) * self._timeout_s)
        return silent_s >= self._timeout_s + self._excused_s[pid]

    @property
    def deadline_s(self) -> float | None:
        """When somebody may be overdue next."""
        pending = [
            heard_s + self._excused_s.get(pid, 0.0) for pid, heard_s in self._heard_s.items() if pid not in self._told
        ]
        return min(pending) + self._timeout_s if pending else None
