"""What a step is for a stage on a GPU, as flat arrays: no CUDA in here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One step of B rows of one token. sources: int32 [B], flat places of `sampled` or -1; literals, positions, slots:
    int32 [B]; page_counts, last_lengths: int32 [B], pages of each row and tokens in its last one; pages: int32, those
    of all rows one after the other."""

    sources: Int32s
    literals: Int32s
    positions: Int32s
    slots: Int32s
    page_counts: Int32s
    last_lengths: Int32s
    pages: Int32s


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One chunk of B rows, T tokens. positions, slots: int64 [T]; query_lens, context_lens, page_counts: int64 [B];
    pages: int64, those of all rows one after the other; wanted: int64 [R], tokens whose logits are asked for."""

    positions: Ints
    slots: Ints
    query_lens: Ints
    context_lens: Ints
    page_counts: Ints
    pages: Ints
    wanted: Ints


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: close together where steps are short, and the most itself."""
    sizes = [1, 2, 4, *range(8, min(most, 64), 8), *range(64, min(most, 256), 16), *range(256, most, 32), most]
    return tuple(sorted({size for size in sizes if size <= most}))
