"""How long a sequence whose KV is here waits for its first step, on stages that take time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.timed_pipeline import TimedDecode

PHASES = 8


def steady(num_stages: int, running: int, phase: int) -> TimedDecode:
    """All of `running` decode, and a step has begun `phase` eighths of a step ago."""
    sim = TimedDecode(num_stages, running=running)
    sim.run_until(20 + phase / PHASES + 0.01)
    return sim


@pytest.mark.parametrize("others", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_stages", "running"), [(1, 3), (2, 3), (2, 16), (2, 17), (4, 32), (4, 34)])
def test_it_waits_for_the_step_that_runs_and_the_one_that_is_ahead(num_stages: int, running: int, others: int) -> None:
    """Not for the turn of a microbatch that is smaller, whoever else has just come."""
    for phase in range(PHASES * num_stages):
        sim = steady(num_stages, running, phase)
        for _ in range(others):
            sim.add()
        assert sim.first_step_wait() <= 2


@pytest.mark.parametrize(("num_stages", "running"), [(2, 16), (2, 17), (4, 33)])
def test_no_stage_waits_because_sequences_come(num_stages: int, running: int) -> None:
    """Those that move on to another microbatch bring steps along whose ids it need not wait for."""
    sim = steady(num_stages, running, 0)
    for at in range(24):
        sim.run_until(22 + at * 0.7)
        sim.add()
    sim.run_until(45)
    begun = [time for time, _ in sim.begun if 20 <= time <= 44]
    assert [later - before for before, later in pairwise(begun)] == [1.0] * (len(begun) - 1)


def test_a_sequence_that_moves_on_loses_a_turn_and_no_more() -> None:
    """Two that come one after the other move one on, which has one step a turn later."""
    sim = steady(2, 16, 0)
    sim.run_until(21.5)
    for _ in range(2):
        sim.add()
    sim.run_until(40)
    assert [gap for gap in sim.gaps(since=18) if gap != 2.0] == [3.0]
