"""What prompts of a prefill instance share, case by case, against simulated stages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.core.commands import COUNT, HANDLE, START, Step
from stagemesh.shared.engine.schedule.output import SequenceEnd
from tests.support.prefill_events import USUAL, events, finish
from tests.support.prefill_prompt import SimPrompt
from tests.support.prefill_sim import PrefillSim


def parts(step: Step) -> list[tuple[int, int, int]]:
    """Handle, start and count of each row."""
    return [(row[HANDLE], row[START], row[COUNT]) for row in step.rows.tolist()]


def ready(sim: PrefillSim, num_tokens: int, common: int) -> SimPrompt:
    """A prompt of the family whose pages are reserved and whose writes are announced: the next poll starts it."""
    prompt = sim.submit(num_tokens, family=("f", common))
    sim.poll()
    sim.reserved(prompt)
    sim.poll()
    sim.filled(prompt)
    return prompt


def cached_of(sim: PrefillSim, lengths: Sequence[tuple[int, int]]) -> list[int | None]:
    """Prompts without a ticket, one after the other: how much of each was there."""
    prompts = []
    for num_tokens, common in lengths:
        prompts.append(sim.submit(num_tokens, ticket=False, family=("f", common)))
        sim.run_dry()
    finish(sim)
    return [prompt.cached for prompt in prompts]


def test_a_prompt_starts_behind_the_full_pages_that_it_has_in_common_with_earlier_ones() -> None:
    sim = PrefillSim(num_stages=2, num_pages=20)
    assert cached_of(sim, [(14, 14), (14, 11), (18, 18), (10, 3)]) == [0, 8, 12, 0]


@pytest.mark.parametrize("num_tokens", [9, 8, 5, 4, 1])
def test_the_last_token_is_always_computed(num_tokens: int) -> None:
    sim = PrefillSim(num_stages=1, num_pages=20)
    assert cached_of(sim, [(num_tokens, 20), (num_tokens, 20)]) == [0, (num_tokens - 1) // 4 * 4]


def test_without_a_cache_every_prompt_is_computed_whole() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, prefix_cache=False)
    assert cached_of(sim, [(14, 14), (14, 14)]) == [0, 0]
    assert sim.scheduler.load.pages_free == sim.scheduler.pages.num_free == 20


def test_prompts_share_what_is_still_being_computed_even_in_one_step() -> None:
    sim = PrefillSim(num_stages=2, num_pages=20, chunk_size=16)
    for _ in range(3):
        sim.submit(10, ticket=False, family=("f", 10))
    sim.poll()
    assert [parts(step) for step in sim.chunks] == [[(1, 0, 10), (2, 8, 2), (3, 8, 2)]]
    assert sim.scheduler.pages.num_used == 3 + 1 + 1
    finish(sim)


def test_a_prompt_that_was_given_up_leaves_no_page_that_it_had_not_computed() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=6, run_ahead=0)
    first = sim.submit(20, ticket=False, family=("f", 20))
    sim.poll()
    sim.abort(first)
    second = sim.submit(20, ticket=False, family=("f", 20))
    finish(sim)
    assert second.cached == 4


def test_all_of_a_prompt_is_sent_also_what_it_found() -> None:
    """The senders of the simulation check that each page was sent once, in order, with the right KV."""
    sim = PrefillSim(num_stages=2, num_pages=20)
    cached_of(sim, [(16, 16)])
    prompt = ready(sim, 18, 16)
    sim.run_dry()
    assert prompt.cached == 16
    written = [sender.outgoing[2] for sender in sim.senders]
    finish(sim)
    assert [outgoing.written for outgoing in written] == [[0, 1, 2, 3, 4]] * 2


def test_a_page_that_is_still_being_sent_is_not_evicted() -> None:
    sim = PrefillSim(num_stages=2, num_pages=4)
    ready(sim, 8, 8)
    sim.run_dry()
    blocked = sim.submit(12, ticket=False)
    sim.run_dry()
    assert (sim.scheduler.pages.num_used, sim.scheduler.pages.num_cached, blocked.cached) == (2, 0, None)
    finish(sim)
    assert blocked.cached == 0


def test_pages_of_a_finished_prompt_are_cached_and_evicted_before_anybody_waits() -> None:
    sim = PrefillSim(num_stages=1, num_pages=4)
    assert cached_of(sim, [(8, 8)]) == [0]
    assert (sim.scheduler.pages.num_free, sim.scheduler.pages.num_cached) == (2, 2)
    other = sim.submit(15, ticket=False)
    sim.poll()
    assert (other.cached, sim.scheduler.pages.num_cached, sim.scheduler.evicted_pages) == (0, 0, 2)
    finish(sim)


def test_what_a_prompt_found_is_not_evicted_to_make_room_for_its_rest() -> None:
    sim = PrefillSim(num_stages=1, num_pages=5)
    assert cached_of(sim, [(8, 8), (8, 0), (20, 8)]) == [0, 0, 8]


def test_a_prompt_that_does_not_fit_takes_nothing_and_evicts_nothing() -> None:
    sim = PrefillSim(num_stages=1, num_pages=6)
    cached_of(sim, [(8, 8)])
    ready(sim, 10, 0)
    sim.run_dry()  # three pages are held until all is sent
    blocked = sim.submit(20, ticket=False, family=("f", 8))
    sim.poll()
    assert (blocked.cached, sim.scheduler.pages.num_cached, sim.scheduler.evicted_pages) == (None, 2, 0)
    finish(sim)
    assert blocked.cached == 8


def test_two_that_compute_the_same_page_keep_one_of_them() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=32)
    for _ in range(2):
        sim.submit(8, ticket=False, family=("f", 8))  # each computes the page of its last token
    finish(sim)
    assert sim.scheduler.pages.num_cached == 2


def test_a_flush_leaves_what_is_held() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20)
    cached_of(sim, [(8, 8), (12, 0)])
    prompt = ready(sim, 10, 8)
    sim.run_dry()
    sim.flush()
    assert sim.scheduler.pages.num_used == 3
    assert len(prompt.outputs) == 1
    finish(sim)
    assert cached_of(sim, [(10, 8)]) == [8]


def test_an_abort_of_one_leaves_the_shared_pages_to_the_other() -> None:
    sim = PrefillSim(num_stages=2, num_pages=20, chunk_size=4)
    first = sim.submit(14, ticket=False, family=("f", 14))
    for _ in range(4):
        sim.crank()
    second = sim.submit(14, ticket=False, family=("f", 14))
    sim.crank()
    sim.abort(first)
    finish(sim)
    assert second.cached
    assert [output.end for output in second.outputs] == [SequenceEnd.LENGTH]


def test_load_does_not_count_what_is_cached() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=8)
    cached_of(sim, [(8, 8)])
    sim.submit(12, family=("f", 8))
    load = sim.scheduler.load
    assert (load.waiting_tokens, load.pages_free) == (4, 20)
    finish(sim)
    stats = sim.scheduler.stats
    assert (stats.prompt_tokens, stats.cached_tokens) == (20, 8)


def test_more_prompts_are_asked_for_when_little_of_them_is_to_be_computed() -> None:
    sim = PrefillSim(num_stages=1, num_pages=40, chunk_size=8, reserve_ahead=2)
    cached_of(sim, [(16, 16)])
    for _ in range(12):
        sim.submit(18, family=("f", 16))
    assert len(sim.poll().reserve) == 8  # two tokens each: two chunks
    finish(sim)


def test_what_has_come_into_the_cache_since_a_prompt_came_counts_when_it_is_asked_for() -> None:
    sim = PrefillSim(num_stages=1, num_pages=40, chunk_size=8, reserve_ahead=2, run_ahead=0)
    for _ in range(12):
        sim.submit(18, family=("f", 16))
    assert sim.poll().reserve == ["t0", "t1"]
    sim.submit(16, ticket=False, family=("f", 16))
    sim.run_dry()
    asked = []
    for prompt in sim.prompts[:2]:
        sim.reserved(prompt)
        sim.poll()
        sim.filled(prompt)
        asked.append(len(sim.poll().reserve))
        sim.run_dry()
    assert asked == [1, 7]  # then the eight that wait have two tokens each: two chunks
    finish(sim)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_nothing_is_computed_twice_while_there_is_room(seed: int) -> None:
    """With pages for all, a page of a family is computed once; only the page of a last token may be computed again."""
    dice, sim = random.Random(seed), PrefillSim(num_stages=2, num_pages=400, max_sequences=50)
    for _ in range(30):
        sim.submit(dice.randint(1, 40), ticket=dice.random() < 0.5, family=(dice.choice("fg"), 40))
        for _ in range(dice.randint(0, 3)):
            sim.crank()
            for event in [event for kind in USUAL for event in events(sim, kind)][: dice.randint(0, 9)]:
                event()
    finish(sim)
    names = [(prompt.ref.request_id.split("~")[1], prompt.num_tokens // 4) for prompt in sim.prompts]
    computed = {(family, page) for family, num_pages in names for page in range(num_pages)}
    assert sim.scheduler.pages.num_cached == len(computed)
    tokens = sum(step.num_tokens for step in sim.chunks)
    assert tokens <= 4 * len(computed) + 4 * len(sim.prompts)
