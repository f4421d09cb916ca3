"""Whether this broker itself has stood still (stopped, or starved), by its own clock. Pure; seconds of one clock.

looking --a look that comes STALL_S late--> stalled: who is missing has `grace_s` to come back --> looking

Heads give up a stream whose far end does not answer. That it has ended is the first thing that a broker sees when it
wakes, and says nothing about them.
"""

from __future__ import annotations

from typing import Final

LOOK_S: Final = 0.5
STALL_S: Final = 5.0  # no stream is given up sooner


class Stalls:
    """`look` is to be called every LOOK_S, and before anybody is blamed for silence."""

    def __init__(self, grace_s: float, now_s: float) -> None:
        self._grace_s, self._looked_s = grace_s, now_s
        self._until_s = float("-inf")

    def look(self, now_s: float) -> float:
        """For how long it has stood still, if that is over just now; else 0."""
        away_s, self._looked_s = now_s - self._looked_s, now_s
        if away_s < STALL_S:
            return 0.0
        self._until_s = now_s + self._grace_s
        return away_s

    def left_s(self, now_s: float) -> float:
        """How much longer the missing may take to come back."""
        return max(0.0, self._until_s - now_s)
