"""What a step is on a GPU, against what the same step is on the CPU."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.commands import FROM_STEP, SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.device_rows import chunk_rows, decode_rows
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.model.cuda.rows import buckets_up_to

PAGE = 4


def runner_of(page_lists: list[list[int]]) -> StageRunner:
    """Sequences 1, 2, ... with those pages."""
    pool = torch.zeros(1 + max(page for pages in page_lists for page in pages), 1, 2, PAGE, 1, 1)
    runner = StageRunner(cast("Any", None), pool, first=True, last=True)
    handles = range(1, len(page_lists) + 1)
    joins = tuple(Join(handle, RequestRef(str(handle), 1), SamplingParams(9)) for handle in handles)
    runner.apply(Command(1, joins=joins, page_deltas=pack_deltas(dict(zip(handles, page_lists, strict=True)))))
    return runner


@st.composite
def steps(draw: st.DrawFn, most: int) -> tuple[StageRunner, Step]:
    """Rows of up to `most` tokens of sequences whose pages lie anywhere, some with pages to spare."""
    spans = draw(st.lists(st.tuples(st.integers(0, 21), st.integers(1, most)), min_size=1, max_size=6))
    counts = [-(-(start + count) // PAGE) + draw(st.integers(0, 2)) for start, count in spans]
    ids = draw(st.permutations(range(sum(counts) + 3)))
    page_lists = [[ids.pop() for _ in range(count)] for count in counts]
    flags = [draw(st.sampled_from([0, SAMPLE])) for _ in spans]
    rows = [(handle, start, count, 0, 0, flags[handle - 1]) for handle, (start, count) in enumerate(spans, start=1)]
    tokens = np.arange(sum(count for _, count in spans))
    return runner_of(page_lists), Step(1, 0, np.array(rows, dtype=np.int64), tokens)


def pages_of(runner: StageRunner) -> Any:
    return lambda handle, end: runner.pages_of(handle)


@given(steps(9))
def test_a_chunk_is_the_cpus(drawn: tuple[StageRunner, Step]) -> None:
    runner, step = drawn
    batch, rows = runner._batch(step), chunk_rows(step, pages_of(runner), PAGE)
    assert rows.positions.tolist() == batch.positions.tolist()
    assert rows.slots.tolist() == batch.slots.tolist()
    assert tuple(rows.query_lens.tolist()) == batch.query_lens
    assert tuple(rows.context_lens.tolist()) == batch.context_lens
    assert rows.wanted.tolist() == batch.logit_rows.tolist()
    seen = [
        entries[: -(-context // PAGE)]
        for entries, context in zip(batch.page_table.tolist(), batch.context_lens, strict=True)
    ]
    assert rows.page_counts.tolist() == [len(pages) for pages in seen]
    assert rows.pages.tolist() == [page for pages in seen for page in pages]


@given(steps(1))
def test_a_decode_step_is_the_cpus(drawn: tuple[StageRunner, Step]) -> None:
    runner, step = drawn
    batch, rows = runner._batch(step), decode_rows(step, pages_of(runner), PAGE, num_slots=3, max_rows=8)
    assert rows.positions.tolist() == batch.positions.tolist()
    assert rows.slots.tolist() == batch.slots.tolist()
    lengths = (rows.page_counts - 1) * PAGE + rows.last_lengths
    assert tuple(lengths.tolist()) == batch.context_lens
    ends = np.cumsum(rows.page_counts)
    for row, end in enumerate(ends.tolist()):
        count = int(rows.page_counts[row])
        assert rows.pages[end - count : end].tolist() == batch.page_table[row, :count].tolist()


def test_ids_are_literal_or_lie_where_their_step_has_put_them() -> None:
    rows = np.array([(1, 3, 1, 0, 0, SAMPLE), (2, 5, 1, 7, 4, SAMPLE | FROM_STEP), (3, 0, 1, 0, 0, SAMPLE)])
    step = Step(8, 1, rows, np.array([11, 12]))
    made = decode_rows(step, lambda handle, end: [0, 1], PAGE, num_slots=3, max_rows=16)
    assert made.sources.tolist() == [-1, 7 % 3 * 16 + 4, -1]
    assert made.literals.tolist() == [11, 0, 12]


@pytest.mark.parametrize("most", [1, 3, 8, 33, 65, 300])
def test_every_batch_has_a_bucket_not_much_larger(most: int) -> None:
    buckets = buckets_up_to(most)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == most
    for rows in range(1, most + 1):
        bucket = next(size for size in buckets if size >= rows)
        assert bucket <= max(2 * rows, rows + 32)
