"""How long a stage has been at its step, and how long that should take at most. Pure; seconds of one clock.

begin --> running --end--> (the next one that has begun)     more than a few times what was expected: overdue
"""

from __future__ import annotations

from collections import deque
from typing import Final

from stagemesh.shared.core.progress import patience_s

REMEMBERED: Final = 64
WARM_UP_STEPS: Final = 3
WARM_UP_S: Final = 60.0  # what the first ones are expected to take: kernels are compiled, weights are paged in


class StepClock:
    """Steps end in the order in which they begin."""

    def __init__(self) -> None:
        self._running: deque[int] = deque()  # tokens of each
        self._since_s = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)  # seconds, tokens

    @property
    def running(self) -> bool:
        return bool(self._running)

    def begin(self, num_tokens: int, now_s: float) -> None:
        if not self._running:
            self._since_s = now_s
        self._running.append(num_tokens)

    def end(self, now_s: float) -> None:
        self._seen.append((now_s - self._since_s, self._running.popleft()))
        self._since_s = now_s

    def excuse(self, away_s: float) -> None:
        """So long this process did not run: that is not the step's fault."""
        self._since_s += away_s

    @property
    def expected_s(self) -> float:
        """What the step that runs, or any like those before, should take at most: time grows with tokens at most
        in proportion, so the worst of the last ones bounds a longer one."""
        if len(self._seen) < WARM_UP_STEPS:
            return WARM_UP_S
        tokens = max([*self._running, *(seen for _, seen in self._seen)])
        return max(took_s * max(1.0, tokens / max(1, seen)) for took_s, seen in self._seen)

    def overdue(self, now_s: float) -> str:
        """In words, how late the step is; empty if it is not, or none runs."""
        late_s, expected_s = now_s - self._since_s, self.expected_s
        if not self._running or late_s < patience_s(expected_s):
            return ""
        return f"a step of {self._running[0]} tokens has run for {late_s:.1f} s, {expected_s:.3f} s were expected"
