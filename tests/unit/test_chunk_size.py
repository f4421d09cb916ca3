"""Chunks are small while there is little to do, so that all stages have work, and grow with what comes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.engine.schedule.chunk_size import CHUNKS_A_STAGE, MOST_PROMPTS, ChunkSize
from tests.support.prefill_events import finish
from tests.support.prefill_sim import PrefillSim

MOST, LEAST = 8192, 2048


def makespan(chunks: Sequence[float], num_stages: int) -> float:
    """Until the last stage is through, if each stage takes that long for each chunk."""
    free_at = [0.0] * num_stages
    for took in chunks:
        at = 0.0
        for stage in range(num_stages):
            at = free_at[stage] = max(at, free_at[stage]) + took
    return free_at[-1]


def sizes_of(num_tokens: int, num_stages: int, least: int | None) -> list[int]:
    """Of the chunks of a prompt that comes alone."""
    sim = PrefillSim(
        num_stages=num_stages, num_pages=10_000, chunk_size=MOST, max_sequences=4, page_size=16, min_chunk_size=least
    )
    sim.submit(num_tokens, ticket=False)
    finish(sim)
    return [step.num_tokens for step in sim.chunks]


@pytest.mark.parametrize(("num_stages", "num_tokens", "share"), [(2, 8_000, 0.65), (4, 8_000, 0.5), (2, 30_000, 0.9)])
def test_a_prompt_that_comes_alone_is_through_sooner(num_stages: int, num_tokens: int, share: float) -> None:
    whole, cut = sizes_of(num_tokens, num_stages, None), sizes_of(num_tokens, num_stages, LEAST)
    assert sum(whole) == sum(cut) == num_tokens
    assert makespan(cut, num_stages) <= share * makespan(whole, num_stages)


def test_a_short_prompt_is_not_cut() -> None:
    assert sizes_of(LEAST, 2, LEAST) == [LEAST]


def test_a_prompt_is_cut_into_no_more_than_keep_the_stages_at_work() -> None:
    sizes = sizes_of(100_000, 2, LEAST)
    assert len(sizes) <= CHUNKS_A_STAGE * 2 + 1
    assert max(sizes) == 100_000 // (CHUNKS_A_STAGE * 2)


def test_many_prompts_fill_chunks() -> None:
    sim = PrefillSim(num_stages=2, num_pages=4_000, chunk_size=32, max_sequences=64, min_chunk_size=8)
    for _ in range(64):
        sim.submit(16, ticket=False)
    finish(sim)
    assert [step.num_tokens for step in sim.chunks] == [32] * 32


def test_it_grows_with_what_comes_and_begins_anew_when_nothing_is_out() -> None:
    size = ChunkSize(MOST, LEAST, 2)
    seen = []
    for expected, is_empty in (([1000], True), ([64_000], False), ([1000], False), ([1000], True)):
        size.update(expected, is_empty=is_empty)
        seen.append(size.tokens)
    assert seen == [LEAST, 4000, 4000, LEAST]


def test_it_looks_at_no_more_prompts_than_it_must() -> None:
    size, looked = ChunkSize(MOST, LEAST, 2), 0

    def prompts() -> object:
        nonlocal looked
        while True:
            looked += 1
            yield 1

    size.update(prompts(), is_empty=True)  # type: ignore[arg-type]
    assert (size.tokens, looked) == (MOST, MOST_PROMPTS + 1)


@given(st.lists(st.tuples(st.lists(st.integers(0, 20_000), max_size=40), st.booleans())), st.integers(1, 9000))
def test_it_keeps_its_bounds(events: list[tuple[list[int], bool]], least: int) -> None:
    size = ChunkSize(MOST, least, 2)
    for expected, is_empty in events:
        size.update(expected, is_empty=is_empty)
        assert min(least, MOST) <= size.tokens <= MOST
