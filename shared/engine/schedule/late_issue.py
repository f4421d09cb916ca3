"""When a step that runs ahead is issued: while prompts are about to join, not at once, so that more of them are in it.

A result makes room for a step that will begin when the one before it ends, a whole step later on a pipeline that is
full. To launch it takes less. Who joins in between would wait for the step after it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SHARE: Final = 0.4  # of a step, however short: the rest is for the launch, and for what may come in its way
LAUNCH_S: Final = 0.002
"""What is left of a long step for the launch of the next one, which takes 1 to 1.2 ms of most hosts, however long steps
are."""
LAUNCHES: Final = 1.5
"""What is left at least, in launches as this host has made them lately."""
GRAIN_S: Final = 0.001  # of timers: a shorter wait would be none, or a longer one
EARLY_S: Final = 0.0002  # that a timer may be
KNOWN_STEPS: Final = 8


class LateIssue:
    """Knows how long steps take from the results of a full pipeline, and waits as long as the shortest of the last ones
    leaves time for a launch. If the pipeline runs empty, it begins to learn anew, and waits for nothing until it knows.
    Not `enabled`, it never waits."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._latest_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=KNOWN_STEPS)
        self._launches_s: deque[float] = deque(maxlen=KNOWN_STEPS)

    def launched(self, took_s: float) -> None:
        """A step was enqueued, in so much time of the host."""
        self._launches_s.append(took_s)

    def result(self, now_s: float, *, is_full: bool) -> None:
        """Of a step. `is_full`: as many steps were out as may be."""
        if is_full and self._latest_s is not None:
            self._steps_s.append(now_s - self._latest_s)
        else:
            self._steps_s.clear()
        self._latest_s = now_s

    def wait_until(self, now_s: float) -> float | None:
        """When the step may be issued that the latest result has made room for; None if now."""
        if not self._enabled or self._latest_s is None or len(self._steps_s) < KNOWN_STEPS:
            return None
        due_s = self._latest_s + int(most_s(min(self._steps_s), max(self._launches_s, default=0.0)) / GRAIN_S) * GRAIN_S
        return due_s if now_s < due_s - EARLY_S else None


def most_s(step_s: float, launch_s: float) -> float:
    """How long a step that runs ahead may wait after the beginning of the one before it, which takes `step_s`, where a
    launch takes `launch_s`."""
    return max(0.0, min(max(SHARE * step_s, step_s - LAUNCH_S), step_s - LAUNCHES * launch_s))
