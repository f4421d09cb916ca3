"""How often something was how large: a histogram of plain numbers.

record (by the thread that owns what is measured, no lock) --snapshot--> Distribution, for other threads too
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Distribution:
    """`buckets` are (upper bound, values at most that large), the last bound is infinite; `total` is their sum."""

    buckets: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1]


class Tally:
    """`bounds` rise; a value falls under the first one that is not below it."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds must rise, got {bounds}")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Values under each bound and above the one before; the last are above all bounds."""
        return tuple(self._counts)

    def record(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def snapshot(self) -> Distribution:
        buckets = zip((*self._bounds, INFINITY), accumulate(self._counts), strict=True)
        return Distribution(tuple(buckets), self.total)
