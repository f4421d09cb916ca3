"""When a step that runs ahead is issued: while prompts are about to join, not at once, so that more of them are in it.

A result makes room for a step that will begin when the one before it ends, a whole step later on a pipeline that is
full. To launch it takes less. Who joins in between would wait for the step after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

SHARE: Final = 0.4  # of a step, however short: the rest is for the launch, and for what may come in its way
LAUNCH_S: Final = 0.002
"""What is left of a long step for the launch of the next one, which takes 1 to 1.2 ms of most hosts, however long steps
are."""
MARGIN_S: Final = 0.00025
"""What is left at least beside a launch, as long and as late as three of four are on this host. The fourth may cost a
little; to leave time for the longest of many costs every prompt the wait for one more step."""
GRAIN_S: Final = 0.001  # of timers: a shorter wait would be none, or a longer one
EARLY_S: Final = 0.0002  # that a timer may be
KNOWN_STEPS: Final = 8
KNOWN_LAUNCHES: Final = 16
PROBE_EVERY: Final = 64  # results: then some steps wait for nothing, so that their time is seen


class LateIssue:
    """Knows how long steps take from the results of a full pipeline, and waits as long as the shortest of the last ones
    leaves time for a launch. If the pipeline runs empty, it begins to learn anew, and waits for nothing until it knows.
    Not `enabled`, it never waits.

    A step that was issued too late lengthens the time between two results. So only times that no wait can have touched
    are learnt, or shorter ones; `depth` is how many results later a wait is seen at most."""

    def __init__(self, *, enabled: bool, depth: int) -> None:
        self._enabled, self._depth = enabled, depth
        self._latest_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=KNOWN_STEPS)
        self._launches_s: deque[float] = deque(maxlen=KNOWN_LAUNCHES)
        self._lateness_s: deque[float] = deque(maxlen=KNOWN_LAUNCHES)
        self._due_s: float | None = None
        self._touched = 0  # results to come that a wait may have touched
        self._since_probe = 0

    def launched(self, took_s: float) -> None:
        """A step was on its device so long after it was issued."""
        self._launches_s.append(took_s)

    def result(self, now_s: float, *, is_full: bool) -> None:
        """Of a step. `is_full`: as many steps were out as may be."""
        if is_full and self._latest_s is not None:
            took_s = now_s - self._latest_s
            if not self._touched or took_s < min(self._steps_s, default=took_s):
                self._steps_s.append(took_s)
        else:
            self._steps_s.clear()
        self._latest_s, self._due_s = now_s, None
        self._touched = max(0, self._touched - 1)
        self._since_probe = (self._since_probe + 1) % PROBE_EVERY

    def wait_until(self, now_s: float) -> float | None:
        """When the step may be issued that the latest result has made room for; None if now."""
        if not self._enabled or self._latest_s is None or len(self._steps_s) < KNOWN_STEPS:
            return None
        if self._since_probe < self._depth + KNOWN_STEPS // 2:
            return None
        if self._due_s is not None and now_s >= self._due_s - EARLY_S:
            self._lateness_s.append(max(0.0, now_s - self._due_s))
            self._due_s = None
            return None
        launch_s = _usual(self._launches_s) + _usual(self._lateness_s)
        due_s = self._latest_s + int(most_s(min(self._steps_s), launch_s) / GRAIN_S) * GRAIN_S
        if now_s >= due_s - EARLY_S:
            return None
        self._due_s, self._touched = due_s, self._depth + 1
        return due_s


def most_s(step_s: float, launch_s: float) -> float:
    """How long a step that runs ahead may wait after the beginning of the one before it, which takes `step_s`, where a
    launch takes `launch_s`."""
    return max(0.0, min(max(SHARE * step_s, step_s - LAUNCH_S), step_s - launch_s - MARGIN_S))


def _usual(values: Collection[float]) -> float:
    """What three of four are at most."""
    return sorted(values)[-(-3 * len(values) // 4) - 1] if values else 0.0
