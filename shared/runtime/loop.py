"""The event loop of a service process: uvloop, short thread switches, nothing that stops it for long, and how late it
runs."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import uvloop

from stagemesh.shared.obs.tally import Tally

T = TypeVar("T")

SWITCH_INTERVAL_S: Final = 1e-4
"""The default of 5 ms would let the forward thread hold the interpreter while a whole decode step waits on the loop."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a new uvloop loop in this thread."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def freeze_heap() -> None:
    """What is there now stays: no garbage collection is to look at it again. A full one stops every thread for as long
    as there are objects, which is 0.1 s and more with torch and its like; and prompts whose pages are remembered, or
    whatever else lives long, bring one about again and again."""
    gc.collect()
    gc.freeze()


class LagSampler:
    """Sleeps again and again and keeps how much later than asked it woke: what any callback of this loop waits."""

    BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self.tally = Tally(self.BOUNDS_S)
        self._max_lag_s = 0.0

    @property
    def max_lag_s(self) -> float:
        """The worst lag since the start or since `reset_max`."""
        return self._max_lag_s

    @property
    def num_samples(self) -> int:
        return self.tally.count

    @property
    def histogram(self) -> tuple[tuple[float, int], ...]:
        """(upper bound in seconds, samples at most that late and later than the bound before); the last is inf."""
        return tuple(zip((*self.BOUNDS_S, float("inf")), self.tally.counts, strict=True))

    def record(self, lag_s: float) -> None:
        self.tally.record(lag_s)
        self._max_lag_s = max(self._max_lag_s, lag_s)

    def reset_max(self) -> float:
        """The worst lag so far, which is forgotten: for a reader that samples the sampler."""
        worst, self._max_lag_s = self._max_lag_s, 0.0
        return worst

    async def run(self) -> None:
        """A child of a service: samples until cancelled."""
        while True:
            asked = time.monotonic() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.record(max(0.0, time.monotonic() - asked))
