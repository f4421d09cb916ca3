"""How many tokens a sequence will still make: learnt from those that have finished.

A request whose limit is `max_tokens` is compared with the latest finished ones of about the same limit (up to a power
of two), and of those only with the ones that had made more tokens than it has so far. Who knows nothing but the limit
takes every length up to it for equally likely, so the mean of what is left is half of it; that guess is worth
PRIOR_WEIGHT finished requests, so it counts where there are few to compare with and vanishes where there are many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Final

from stagemesh.shared.core.sampling import SamplingParams

WINDOW: Final = 256  # finished requests that are remembered for each bucket: older traffic is forgotten
PRIOR_WEIGHT: Final = 1.0


class LengthEstimator:
    """`finished` teaches, `remaining` asks. Memory is bounded: a bucket for each power of two, WINDOW lengths each."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Lengths] = {}

    def finished(self, sampling: SamplingParams, length: int) -> None:
        """A request has ended with its `length`th new token. One that can end only by its limit teaches nothing."""
        if sampling.ending_ids:
            self._buckets.setdefault(sampling.max_tokens.bit_length(), _Lengths()).add(length)

    def remaining(self, sampling: SamplingParams, made: int) -> float:
        """The expected number of tokens after the `made` ones that there are; at most what the limit leaves."""
        left = max(0, sampling.max_tokens - made)
        if not sampling.ending_ids:
            return left
        bucket = self._buckets.get(sampling.max_tokens.bit_length())
        count, total = bucket.beyond(made) if bucket is not None else (0, 0)
        mean = (total - count * made + PRIOR_WEIGHT * left / 2) / (count + PRIOR_WEIGHT)
        return min(left, mean)


class _Lengths:
    """The latest WINDOW lengths."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the lengths from each place on

    def add(self, length: int) -> None:
        self._latest.append(length)
        insort(self._sorted, length)
        if len(self._latest) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._sums = None

    def beyond(self, made: int) -> tuple[int, int]:
        """How many lengths are above `made`, and their sum."""
        if self._sums is None:
            self._sums = [0]
            for length in reversed(self._sorted):
                self._sums.append(self._sums[-1] + length)
        count = len(self._sorted) - bisect_right(self._sorted, made)
        return count, self._sums[count]
