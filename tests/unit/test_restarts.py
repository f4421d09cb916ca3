"""What is started again and when, as decisions without processes."""

from __future__ import annotations

import pytest

from stagemesh.shared.runtime.plan import ProcessSpec
from stagemesh.shared.runtime.restarts import FALL_S, FIRST_DELAY_S, MAX_FALLS, WITHIN_S, Due, Restarts, group_of

NONE, D0 = frozenset[str](), frozenset({"d0"})


def test_stages_of_an_instance_are_one_group() -> None:
    assert group_of(ProcessSpec("d0/1", "decode", "d0", 1, "unix:/d")) == "d0"
    assert group_of(ProcessSpec("router", "router", None, None, "unix:/r")) == "router"


def test_a_group_is_started_again_when_all_of_it_is_reaped_and_the_delay_is_over() -> None:
    restarts = Restarts()
    assert restarts.died("d0", 10.0)
    assert restarts.died("d0", 10.1), "it follows"
    assert restarts.deadline(10.0) == 10.0 + FIRST_DELAY_S
    assert restarts.due(10.1, NONE) == Due()
    assert restarts.due(11.0, D0) == Due()
    assert restarts.due(11.0, NONE) == Due(again=("d0",))
    assert restarts.due(12.0, NONE) == Due()
    assert (restarts.counts["d0"], restarts.deadline(12.0)) == (1, None)


def test_who_hangs_on_is_killed_once() -> None:
    restarts = Restarts()
    restarts.died("d0", 0.0)
    assert restarts.deadline(1.0) == FALL_S
    assert restarts.due(FALL_S, D0) == Due(hanging=("d0",))
    assert restarts.due(FALL_S + 1, D0) == Due()
    assert restarts.deadline(FALL_S + 1) is None
    assert restarts.due(FALL_S + 2, NONE) == Due(again=("d0",))


def test_each_fall_is_waited_for_longer_until_it_is_one_too_many() -> None:
    restarts, now, delays = Restarts(), 0.0, []
    for _ in range(MAX_FALLS - 1):
        assert restarts.died("d0", now)
        at = restarts.deadline(now)
        assert at is not None
        delays.append(at - now)
        now = at
        assert restarts.due(now, NONE).again == ("d0",)
    assert delays == pytest.approx([FIRST_DELAY_S * 2**n for n in range(MAX_FALLS - 1)])
    assert restarts.died("router", now), "others have falls of their own"
    assert not restarts.died("d0", now)


def test_falls_are_forgotten_after_a_while() -> None:
    restarts = Restarts()
    for n in range(3 * MAX_FALLS):
        now = n * WITHIN_S
        assert restarts.died("d0", now)
        assert restarts.due(now + FIRST_DELAY_S, NONE).again == ("d0",)
