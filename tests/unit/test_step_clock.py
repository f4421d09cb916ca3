"""When a step has run for too long, as decisions about numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.progress import STANDSTILL_S, STEPS, patience_s
from stagemesh.shared.stage.step_clock import WARM_UP_S, WARM_UP_STEPS, StepClock


def warm(took_s: float, num_tokens: int) -> tuple[StepClock, float]:
    """A clock that has seen enough steps, and its time."""
    clock, now_s = StepClock(), 100.0
    for _ in range(WARM_UP_STEPS):
        clock.begin(num_tokens, now_s)
        now_s += took_s
        clock.end(now_s)
    return clock, now_s


def test_quick_steps_are_given_the_least_patience() -> None:
    clock, now_s = warm(0.01, 4)
    clock.begin(4, now_s)
    assert clock.overdue(now_s + STANDSTILL_S - 0.01) == ""
    assert "a step of 4 tokens has run for 3.0 s, 0.010 s were expected" in clock.overdue(now_s + STANDSTILL_S)


def test_slow_steps_are_given_several_times_what_they_take() -> None:
    clock, now_s = warm(2.0, 4)
    clock.begin(4, now_s)
    assert clock.overdue(now_s + 2.0 * STEPS - 0.1) == ""
    assert clock.overdue(now_s + 2.0 * STEPS)


def test_a_long_chunk_after_short_ones_is_given_more() -> None:
    clock, now_s = warm(0.1, 16)
    clock.begin(1600, now_s)
    assert clock.expected_s == pytest.approx(0.1 * 100)
    assert clock.overdue(now_s + 49.0) == ""
    assert clock.overdue(now_s + 50.1)


def test_the_first_steps_are_given_the_time_to_warm_up() -> None:
    clock = StepClock()
    clock.begin(4, 0.0)
    assert clock.overdue(STEPS * WARM_UP_S - 1) == ""
    assert clock.overdue(STEPS * WARM_UP_S)


def test_nothing_that_runs_is_never_overdue() -> None:
    clock, now_s = warm(0.01, 4)
    assert not clock.running
    assert clock.overdue(now_s + 1e6) == ""


def test_the_time_in_which_nobody_ran_is_not_the_steps() -> None:
    clock, now_s = warm(0.01, 4)
    clock.begin(4, now_s)
    clock.excuse(10.0)
    assert clock.overdue(now_s + 10.0 + STANDSTILL_S - 0.01) == ""
    assert clock.overdue(now_s + 10.0 + STANDSTILL_S)


def test_a_step_that_waits_behind_others_begins_when_they_end() -> None:
    clock, now_s = warm(0.01, 4)
    clock.begin(4, now_s)
    clock.begin(4, now_s)
    clock.end(now_s + 2.5)
    assert clock.overdue(now_s + 4.0) == ""
    assert clock.running


@given(st.lists(st.tuples(st.floats(0.001, 10.0), st.integers(1, 4096)), min_size=WARM_UP_STEPS, max_size=80))
def test_no_step_that_is_as_quick_as_any_before_is_ever_overdue(steps: list[tuple[float, int]]) -> None:
    clock, now_s = StepClock(), 0.0
    for took_s, tokens in steps:
        clock.begin(tokens, now_s)
        now_s += took_s
        clock.end(now_s)
    for took_s, tokens in steps[-WARM_UP_STEPS:]:
        clock.begin(tokens, now_s)
        assert clock.overdue(now_s + took_s) == ""
        now_s += took_s
        clock.end(now_s)
    assert patience_s(clock.expected_s) >= STANDSTILL_S
