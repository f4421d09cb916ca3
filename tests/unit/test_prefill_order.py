"""In what order prompts are asked for and start: recomputed ones, then by priority and waiting, then by age."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.commands import HANDLE
from stagemesh.shared.engine.schedule.prefill_state import start_order
from tests.support.prefill_events import finish
from tests.support.prefill_sim import PrefillSim

STANDINGS = st.tuples(st.booleans(), st.integers(-100, 100), st.integers(0, 10_000))


def started(sim: PrefillSim) -> list[int]:
    """Numbers of the prompts in the order of their first rows."""
    handles = dict.fromkeys(handle for step in sim.chunks for handle in step.rows[:, HANDLE].tolist())
    return [sim.prompts.index(sim.by_handle[handle]) for handle in handles]


def order_of(*standings: dict[str, Any], ageing_s: float = 10.0) -> list[int]:
    """How prompts without a ticket start that come in this order, while one is under way."""
    sim = PrefillSim(num_stages=1, num_pages=40, chunk_size=4, run_ahead=0, priority_ageing_s=ageing_s)
    sim.submit(8, ticket=False)
    sim.poll()
    for standing in standings:
        sim.submit(4, ticket=False, **standing)
    finish(sim)
    return [number - 1 for number in started(sim)[1:]]


def test_a_prompt_that_has_started_is_finished_first() -> None:
    sim = PrefillSim(num_stages=1, num_pages=40, chunk_size=4, run_ahead=0)
    sim.submit(12, ticket=False)
    sim.poll()
    sim.submit(4, ticket=False, priority=100, recompute=True)
    finish(sim)
    assert [step.rows[:, HANDLE].tolist() for step in sim.chunks] == [[1], [1], [1], [2]]


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        pytest.param([{}, {}, {}], [0, 1, 2], id="as they came"),
        pytest.param([{}, {"priority": 1}, {"priority": -1}, {"priority": 2}], [3, 1, 0, 2], id="priority"),
        pytest.param([{}, {"waited_s": 5.0}, {"waited_s": 8.0}], [2, 1, 0], id="age at the router"),
        pytest.param([{"priority": 1}, {"waited_s": 11.0}, {"waited_s": 9.0}], [1, 0, 2], id="waiting makes up"),
        pytest.param([{"priority": 100}, {"recompute": True}], [1, 0], id="recompute"),
        pytest.param(
            [{"recompute": True}, {"recompute": True, "priority": 1}, {"recompute": True, "waited_s": 50.0}],
            [2, 1, 0],
            id="among those to be recomputed",
        ),
    ],
)
def test_the_order_of_starting(standings: list[dict[str, Any]], expected: list[int]) -> None:
    assert order_of(*standings) == expected


def test_ageing_is_a_setting() -> None:
    standings = {"priority": 1}, {"waited_s": 3.0}
    assert [order_of(*standings, ageing_s=ageing_s) for ageing_s in (1.0, 10.0)] == [[1, 0], [0, 1]]


def test_pages_are_asked_for_in_that_order() -> None:
    sim = PrefillSim(num_stages=1, num_pages=40, chunk_size=4, reserve_ahead=2)
    for standing in ({}, {"priority": 1}, {"recompute": True}, {"priority": 2}):
        sim.submit(10, **standing)
    assert sim.poll().reserve == ["t2", "t3"]
    sim.submit(10, recompute=True, waited_s=1.0)
    assert sim.poll().reserve == ["t4"]
    finish(sim)


def test_a_prompt_of_low_priority_starts_when_it_has_waited_long_enough() -> None:
    """Against a stream of others that never ends: those that come later than its disadvantage are behind it."""
    sim = PrefillSim(num_stages=1, num_pages=40, chunk_size=4, run_ahead=0)
    slow = sim.submit(4, ticket=False, priority=-100)
    for _ in range(30):
        sim.submit(4, ticket=False)
        sim.crank()
        assert slow.cached is None
    old = sim.submit(4, ticket=False, priority=-2, waited_s=20.5)  # just as if it had come so long ago
    sim.submit(4, ticket=False)
    sim.crank(3)
    assert old.cached is not None
    finish(sim)


@given(STANDINGS, STANDINGS, st.integers(0, 100), st.integers(1, 60))
def test_the_order_is_that_of_priority_and_waiting_at_any_time(
    one: tuple[bool, int, int], other: tuple[bool, int, int], later: int, ageing_s: int
) -> None:
    def rank(standing: tuple[bool, int, int], handle: int) -> tuple[bool, float, int]:
        recompute, priority, arrived_s = standing
        now_s = 10_000 + later
        return (not recompute, -(priority * ageing_s + (now_s - arrived_s)), handle)

    def key(standing: tuple[bool, int, int], handle: int) -> tuple[bool, float, int]:
        recompute, priority, arrived_s = standing
        return start_order(arrived_s, handle, priority=priority, ageing_s=ageing_s, recompute=recompute)

    assert (key(one, 1) < key(other, 2)) == (rank(one, 1) < rank(other, 2))
