"""A step and the pages of its sequences, as the flat arrays that a stage on a GPU works on. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stagemesh.shared.core.commands import (
    COUNT,
    FLAGS,
    FROM_STEP,
    HANDLE,
    SOURCE_ROW,
    SOURCE_STEP,
    START,
    Ints,
    Step,
)
from stagemesh.shared.engine.logit_rows import logit_rows
from stagemesh.shared.model.cuda.rows import ChunkRows, DecodeRows

PagesOf = Callable[[int, int], list[int]]
"""(handle, tokens that it must hold) -> the pages of that sequence, in order."""


def decode_rows(step: Step, pages_of: PagesOf, page_size: int, *, num_slots: int, max_rows: int) -> DecodeRows:
    """A step of one token a row. Ids that a step has sampled lie in row-major slots, `number % num_slots` of them, of
    `max_rows` each."""
    rows = step.rows
    positions = rows[:, START]
    counts = positions // page_size + 1
    pages = _pages(rows, counts, pages_of)
    firsts = np.cumsum(counts) - counts
    pointing = (rows[:, FLAGS] & FROM_STEP) != 0
    sources = np.where(pointing, rows[:, SOURCE_STEP] % num_slots * max_rows + rows[:, SOURCE_ROW], -1)
    literals = np.zeros(len(rows), dtype=np.int64)
    literals[~pointing] = step.tokens
    slots = pages[firsts + counts - 1] * page_size + positions % page_size
    as_int32 = (sources, literals, positions, slots, counts, positions % page_size + 1, pages)
    return DecodeRows(*(values.astype(np.int32) for values in as_int32))


def chunk_rows(step: Step, pages_of: PagesOf, page_size: int) -> ChunkRows:
    """A chunk of prompts."""
    rows = step.rows
    starts, lengths = rows[:, START], rows[:, COUNT]
    contexts = starts + lengths
    counts = (contexts - 1) // page_size + 1
    pages = _pages(rows, counts, pages_of)
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths) + np.repeat(starts, lengths)
    firsts = np.repeat(np.cumsum(counts) - counts, lengths)
    slots = pages[firsts + positions // page_size] * page_size + positions % page_size
    return ChunkRows(positions, slots, lengths, contexts, counts, pages, logit_rows(rows).tokens)


def _pages(rows: Ints, counts: Ints, pages_of: PagesOf) -> Ints:
    """The first `counts[r]` pages of each row's sequence, one after the other."""
    flat: list[int] = []
    ends = (rows[:, START] + rows[:, COUNT]).tolist()
    for handle, count, end in zip(rows[:, HANDLE].tolist(), counts.tolist(), ends, strict=True):
        flat += pages_of(handle, end)[:count]
    return np.array(flat, dtype=np.int64)
