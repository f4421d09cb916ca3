"""Layer ranges: how a model is cut into stages, and who sends what to whom when two cuts differ.

prefill  [0, 8)      [8, 24)      [24, 30)
decode   [0, 16)           [16, 30)
plan     0->0 [0,8)  1->0 [8,16)  1->1 [16,24)  2->1 [24,30)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stagemesh.shared.errors import Rejected


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers [lo, hi) of a model."""

    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    def intersect(self, other: LayerRange) -> LayerRange | None:
        """The layers in both, or None."""
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        return LayerRange(lo, hi) if lo < hi else None


@dataclass(frozen=True, slots=True, order=True)
class Leg:
    """Prefill stage `writer` writes `layers` of every page to decode stage `target`."""

    writer: int
    target: int
    layers: LayerRange


def split_layers(
    num_layers: int, pp_size: int, sizes: Sequence[int] | None = None, *, head_layers: float = 0.0
) -> tuple[LayerRange, ...]:
    """The ranges of `pp_size` stages: `sizes` layers each, or such that the slowest stage is as quick as can be, with
    leftovers on the first ones. `head_layers` is what the head costs the last stage, counted in layers.

    Raises Rejected if the sizes do not add up, or if a stage would have no layer.
    """
    if not 1 <= pp_size <= num_layers:
        raise Rejected("pp_size", f"must be in 1..{num_layers} (one layer a stage at least), got {pp_size}")
    if not sizes:
        sizes = _balanced(num_layers, pp_size, head_layers)
    if len(sizes) != pp_size or sum(sizes) != num_layers or min(sizes) < 1:
        raise Rejected(
            "layers", f"needs {pp_size} sizes of at least 1 that add up to {num_layers} layers, got {list(sizes)}"
        )
    return tuple(LayerRange(lo, hi) for lo, hi in pairwise(accumulate(sizes, initial=0)))


def _balanced(num_layers: int, pp_size: int, head_layers: float) -> list[int]:
    if pp_size == 1:
        return [num_layers]
    others = pp_size - 1

    def cost(last: int) -> tuple[float, float, int]:
        """The slowest stage, how far the quickest is from it, and the fewest layers where the head is."""
        most, least = -(-(num_layers - last) // others), (num_layers - last) // others
        slowest = max(most, last + head_layers)
        return slowest, slowest - min(least, last + head_layers), last

    last = min(range(1, num_layers - others + 1), key=cost)
    base, leftover = divmod(num_layers - last, others)
    return [*(base + (rank < leftover) for rank in range(others)), last]


def plan_legs(writers: Sequence[LayerRange], targets: Sequence[LayerRange]) -> tuple[Leg, ...]:
    """Every leg from the stages of a prefill instance to those of a decode instance. Each layer is in exactly one."""
    return tuple(
        Leg(writer, target, layers)
        for writer, source in enumerate(writers)
        for target, sink in enumerate(targets)
        if (layers := source.intersect(sink)) is not None
    )
