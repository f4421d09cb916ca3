"""The length of answers, learnt from those that have finished."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.lengths import WINDOW, LengthEstimator

ASKED = SamplingParams(max_tokens=1_000, eos_token_ids=(0,))


def taught(lengths: list[int], sampling: SamplingParams = ASKED) -> LengthEstimator:
    estimator = LengthEstimator()
    for length in lengths:
        estimator.finished(sampling, length)
    return estimator


def test_who_knows_nothing_expects_half_of_what_the_limit_leaves() -> None:
    assert LengthEstimator().remaining(ASKED, 1) == 999 / 2
    assert LengthEstimator().remaining(ASKED, 901) == 99 / 2
    assert LengthEstimator().remaining(ASKED, 1_000) == 0


@pytest.mark.parametrize(
    "sampling", [SamplingParams(max_tokens=50), SamplingParams(50, ignore_eos=True, eos_token_ids=(0,))]
)
def test_what_only_its_limit_can_end_is_certain(sampling: SamplingParams) -> None:
    estimator = taught([3] * 50, sampling)
    assert estimator.remaining(sampling, 1) == 49
    assert estimator.remaining(SamplingParams(max_tokens=50, eos_token_ids=(0,)), 1) == 49 / 2  # and teaches nothing


def test_it_learns() -> None:
    """Answers of 80 to 120 tokens where 1,000 are allowed: the error falls as they finish, and is small in the end."""
    dice, estimator, errors = random.Random(1), LengthEstimator(), list[float]()
    for _ in range(200):
        length = dice.randint(80, 120)
        errors.append(abs(estimator.remaining(ASKED, 1) - (length - 1)))
        estimator.finished(ASKED, length)
    first, later, last = (sum(errors[at : at + 10]) / 10 for at in (0, 20, 190))
    assert first > later > 15 > last


def test_it_expects_what_those_did_that_had_come_as_far() -> None:
    """Most answers are short, a few long: one that has outlived the short ones is a long one."""
    estimator = taught([10] * 200 + [500] * 50)
    assert 90 < estimator.remaining(ASKED, 1) < 115
    assert 380 < estimator.remaining(ASKED, 100) < 405
    assert estimator.remaining(ASKED, 600) == 400 / 2  # longer than any


def test_it_follows_when_the_traffic_changes() -> None:
    estimator = taught([500] * 1_000 + [20] * WINDOW)
    assert estimator.remaining(ASKED, 1) < 25


def test_limits_of_another_size_are_learnt_apart() -> None:
    estimator = taught([10] * 100)
    assert estimator.remaining(SamplingParams(max_tokens=30_000, eos_token_ids=(0,)), 1) > 10_000


@given(st.lists(st.integers(1, 1_000), max_size=3 * WINDOW), st.integers(0, 1_000))
def test_it_is_the_mean_of_the_latest_that_were_longer_and_never_more_than_the_limit_leaves(
    lengths: list[int], made: int
) -> None:
    longer = [length for length in lengths[-WINDOW:] if length > made]
    left = 1_000 - made
    expected = (sum(longer) - made * len(longer) + left / 2) / (len(longer) + 1)
    told = taught(lengths).remaining(ASKED, made)
    assert told == pytest.approx(min(left, expected))
    assert 0 <= told <= left
