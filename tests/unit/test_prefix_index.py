"""What a router believes prefill instances to have cached: bounded, and of this life of theirs only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.router.placement import Sent, place
from stagemesh.services.router.prefixes import PrefixIndex, page_hashes
from tests.support.instances import PREFILL, instance_of

PAGE = 4  # instance_of's
TEXT = list(range(100, 140))


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        pytest.param(TEXT, 36, id="the same: the last token is computed"),
        pytest.param([*TEXT, 1], 40, id="longer"),
        pytest.param([*TEXT[:10], 1, 2, 3], 8, id="full pages only"),
        pytest.param(TEXT[:3], 0, id="shorter than a page"),
        pytest.param([1, *TEXT[1:]], 0, id="another beginning"),
        pytest.param(TEXT[4:], 0, id="not from its beginning"),
    ],
)
def test_a_prompt_that_begins_like_one_that_was_sent_has_that_cached(prompt: list[int], cached: int) -> None:
    index, info = PrefixIndex(), instance_of("p", PREFILL)
    index.note(info, TEXT)
    assert index.cached_tokens(info, prompt) == cached
    assert index.cached_tokens(instance_of("q", PREFILL), prompt) == 0


def test_another_epoch_has_nothing() -> None:
    index, info = PrefixIndex(), instance_of("p", PREFILL)
    index.note(info, TEXT)
    later = instance_of("p", PREFILL, epoch=2)
    assert index.cached_tokens(later, TEXT) == 0
    index.note(later, TEXT[:8])
    index.forget(info.ref)  # late: that life has been replaced already
    assert [index.cached_tokens(i, [*TEXT[:8], 1]) for i in (info, later)] == [0, 8]
    index.forget(later.ref)
    assert (index.cached_tokens(later, TEXT), index.num_pages) == (0, 0)


@given(st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=40), st.integers(0, 12), st.integers(1, 12))
def test_it_knows_no_more_pages_than_an_instance_has_or_than_it_may(
    prompts: list[list[int]], max_pages: int, num_pages: int
) -> None:
    index, info = PrefixIndex(max_pages), instance_of("p", PREFILL, num_pages=num_pages)
    for prompt in prompts:
        index.note(info, prompt)
        assert index.num_pages <= min(max_pages, num_pages)
    if prompts:
        last = prompts[-1]  # its beginning is known, as far as there is room
        known = min(max_pages, num_pages, len(last) // PAGE)
        assert index.cached_tokens(info, [*last, 1]) >= known * PAGE


def test_of_a_prompt_that_is_too_long_the_beginning_is_known() -> None:
    index, info = PrefixIndex(), instance_of("p", PREFILL, num_pages=3)
    index.note(info, TEXT)
    assert index.cached_tokens(info, TEXT) == 3 * PAGE


def test_what_was_sent_least_recently_is_forgotten_first() -> None:
    index, info = PrefixIndex(), instance_of("p", PREFILL, num_pages=4)
    for number in (1, 2, 1, 3):
        index.note(info, [number] * 8)
    assert [index.cached_tokens(info, [number] * 9) for number in (1, 2, 3)] == [8, 0, 8]


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 9))
def test_there_is_a_hash_for_each_full_page(token_ids: list[int], page_size: int) -> None:
    hashes = page_hashes(token_ids, page_size)
    assert len(hashes) == len(token_ids) // page_size
    assert page_hashes(token_ids[: len(hashes) * page_size], page_size) == hashes


def test_requests_that_share_a_prompt_gather_where_it_is_until_the_queue_there_is_too_long() -> None:
    """Two instances that never get anything done: what is sent to them only adds up."""
    instances = [instance_of(name, PREFILL, num_pages=1000) for name in ("p1", "p2")]
    index, dice = PrefixIndex(), random.Random(1)
    sent: dict[str, Sent] = {}

    def send(prompt: list[int]) -> str:
        cached = {info.ref.name: index.cached_tokens(info, prompt) for info in instances}
        chosen = place(instances, prompt_tokens=len(prompt), max_tokens=1, sent=sent, cached=cached).prefill
        name, before = chosen.ref.name, sent.get(chosen.ref.name, Sent())
        sent[name] = Sent(before.requests + 1, before.tokens + len(prompt) - cached[name])
        index.note(chosen, prompt)
        return name

    begins = [[dice.randrange(1000) for _ in range(400)] for _ in range(2)]
    places = [[send([*begin, *(dice.randrange(1000) for _ in range(10))]) for begin in begins] for _ in range(20)]
    assert places == [["p1", "p2"]] * 20
    lonely = [send([*begins[0], number]) for number in range(600)]
    assert lonely[0] == "p1"
    assert "p2" in lonely
    assert abs(sent["p1"].tokens - sent["p2"].tokens) <= 400
