"""Who may wait for a first token, and what those hear who may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.router.waiting import MOST_RETRY_AFTER_S, Waiting
from stagemesh.shared.errors import Exhausted


def full(count: int, since_s: float = 0.0) -> Waiting:
    waiting = Waiting(count, max_s=30.0)
    for index in range(count):
        waiting.enter(f"r{index}", since_s)
    return waiting


def test_one_more_than_may_wait_is_refused_with_a_hint() -> None:
    waiting = full(3)
    with pytest.raises(
        Exhausted, match=r"no more than 3 requests may wait: 3 wait .*oldest for 7\.5 s; try again"
    ) as e:
        waiting.enter("one more", 7.5)
    assert e.value.retry_after_s == 8.0
    assert "one more" not in waiting
    waiting.leave("r1")
    waiting.enter("one more", 8.0)
    assert len(waiting) == 3


def test_the_oldest_is_the_first_of_those_that_still_wait() -> None:
    waiting = Waiting(9, 30.0)
    assert waiting.oldest_s(5.0) == 0.0
    for at_s in (1.0, 2.0, 4.0):
        waiting.enter(f"r{at_s}", at_s)
    waiting.served("r1.0", 5.0)
    assert waiting.oldest_s(5.0) == 3.0
    waiting.leave("r2.0")
    assert waiting.oldest_s(5.0) == 1.0
    assert waiting.left_s("r4.0", 5.0) == 29.0


def test_the_hint_is_when_those_who_wait_will_have_been_served_at_the_pace_of_the_last() -> None:
    waiting = full(20)
    for index in range(10):
        waiting.served(f"r{index}", float(index + 1))
    # ten first tokens since 1.0, nine seconds ago: the ten who wait take as long again
    assert waiting.retry_after_s(10.0) == 9.0
    assert waiting.retry_after_s(19.0) == 18.0  # nobody has been served for a while
    assert waiting.retry_after_s(1e6) == MOST_RETRY_AFTER_S


def test_a_pace_of_another_time_says_nothing() -> None:
    waiting = full(2)
    for name in ("r0", "r1"):
        waiting.served(name, 1.0)
    waiting.enter("later", 1000.0)
    assert waiting.retry_after_s(1000.0) == 1.0


def test_what_has_waited_too_long_hears_how_long_that_is() -> None:
    error = full(2).too_long(30.0)
    assert str(error).startswith("no first token within 30 s: 2 wait for their first token, the oldest for 30.0 s;")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["enter", "served", "leave"]))))
def test_no_more_wait_than_may_whatever_comes(moves: list[tuple[str, str]]) -> None:
    waiting, present = Waiting(3, 30.0), set[str]()
    for at, (name, move) in enumerate(moves):
        if move == "enter" and name not in present:
            if len(present) < 3:
                waiting.enter(name, float(at))
                present.add(name)
            else:
                with pytest.raises(Exhausted):
                    waiting.enter(name, float(at))
                assert 1.0 <= waiting.retry_after_s(float(at)) <= MOST_RETRY_AFTER_S
        elif move == "served":
            waiting.served(name, float(at))
            present.discard(name)
        elif move == "leave":
            waiting.leave(name)
            present.discard(name)
        assert len(waiting) == len(present)
        assert all((each in waiting) == (each in present) for each in "abcdef")
        waiting.check_integrity()
