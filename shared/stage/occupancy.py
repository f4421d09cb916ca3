"""Where the time of a stage goes: it runs a step, or it could not though it had work, or it had no work.

idle --a command--> starved --its inputs are there--> forward --more on the stage--> starved
                                                              `--nothing more--> idle
"""

from __future__ import annotations

from enum import Enum


class Activity(Enum):
    IDLE = "idle"
    STARVED = "starved"  # a bubble: sequences or commands are here, but nothing can be run
    FORWARD = "forward"


class Occupancy:
    """Times are CLOCK_MONOTONIC in nanoseconds. The three add up to the time since the start."""

    def __init__(self, now_ns: int) -> None:
        self.activity = Activity.IDLE
        self.since_ns = now_ns
        self._spent_ns = dict.fromkeys(Activity, 0)

    def move(self, activity: Activity, now_ns: int) -> None:
        """From now on it is `activity`. To say what it is already changes nothing."""
        if activity is not self.activity:
            self._spent_ns[self.activity] += now_ns - self.since_ns
            self.activity, self.since_ns = activity, now_ns

    def seconds(self, activity: Activity, now_ns: int) -> float:
        """All time so far in `activity`, with what is not over."""
        current_ns = now_ns - self.since_ns if activity is self.activity else 0
        return (self._spent_ns[activity] + current_ns) / 1e9
