"""Starting again what has died while the mesh served, as a pure policy: it says what and when, the supervisor does it.

running --a member dies--> falling --all are reaped, and the back-off is over--> started again
   |                          |`--somebody hangs on: is killed
   `--planned-----------------'  which is no fall, and has no back-off

A group lives and dies as one: the stages of an instance, else a process by itself. Times are seconds of one clock.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from stagemesh.shared.runtime.plan import ProcessSpec

MAX_FALLS: Final = 5
WITHIN_S: Final = 60.0
FIRST_DELAY_S: Final = 0.2
FALL_S: Final = 5.0
"""A stage notices that its ring is broken, and closes what it has, long before that."""


def group_of(spec: ProcessSpec) -> str:
    """The name of what is started again together."""
    return spec.instance or spec.name


@dataclass(frozen=True, slots=True)
class Due:
    """`again` are to be started, `hanging` are to be killed."""

    again: tuple[str, ...] = ()
    hanging: tuple[str, ...] = ()


class Restarts:
    """Of the groups of one mesh, by name."""

    def __init__(self) -> None:
        self._falls: dict[str, deque[float]] = {}
        self._start_at: dict[str, float] = {}
        self._kill_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # how often each was started again

    def died(self, group: str, now: float) -> bool:
        """One of the group has been reaped. False if it has fallen too often to be started again."""
        if group in self._start_at:
            return True  # it follows the first one
        falls = self._falls.setdefault(group, deque(maxlen=MAX_FALLS))
        falls.append(now)
        recent = sum(now - fall < WITHIN_S for fall in falls)
        self._start_at[group] = now + FIRST_DELAY_S * 2 ** (recent - 1)
        self._kill_at[group] = now + FALL_S
        return recent < MAX_FALLS

    def planned(self, group: str, now: float, within_s: float) -> bool:
        """Its members have been asked to end, within `within_s`. False if it falls already."""
        if group in self._start_at:
            return False
        self._start_at[group], self._kill_at[group] = now, now + within_s
        return True

    @property
    def falling(self) -> frozenset[str]:
        """Groups that have lost a member, or are to end, and are not started again yet."""
        return frozenset(self._start_at)

    def due(self, now: float, alive: frozenset[str]) -> Due:
        """What is to be done now; each is said once. `alive` are the groups with a member that is not reaped."""
        again = tuple(group for group, at in self._start_at.items() if now >= at and group not in alive)
        hanging = tuple(group for group, at in self._kill_at.items() if now >= at and group in alive)
        for group in again:
            del self._start_at[group]
            self.counts[group] += 1
        for group in (*again, *hanging):
            self._kill_at.pop(group, None)
        return Due(again, hanging)

    def deadline(self, now: float) -> float | None:
        """When something may be due next, but for what an exit brings about."""
        return min((at for at in (*self._start_at.values(), *self._kill_at.values()) if at > now), default=None)
