"""How long a sequence whose KV is here waits for its first step, on stages that take time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule import decode
from stagemesh.shared.engine.schedule.late_issue import (
    GRAIN_S,
    KNOWN_LAUNCHES,
    KNOWN_STEPS,
    LAUNCH_S,
    MARGIN_S,
    PROBE_EVERY,
    LateIssue,
    most_s,
)
from tests.support.timed_pipeline import STEP_S, TimedDecode

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


def late(monkeypatch: pytest.MonkeyPatch, num_stages: int, running: int, **launch: Any) -> TimedDecode:
    """All of `running` decode, and another one's prompt is being computed."""
    sim = TimedDecode(num_stages, running=0, late_issue=True, **launch)
    monkeypatch.setattr(decode, "time", sim)
    for _ in range(running):
        sim.add()
    sim.run_until(20.01)
    sim.announce(RequestRef("computed", 1), "computed")
    return sim


@pytest.mark.parametrize(("num_stages", "running"), [(1, 3), (2, 16), (2, 17), (4, 34)])
def test_while_prompts_come_a_step_is_issued_later_and_begins_no_later(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, running: int
) -> None:
    waits = []
    for phase in range(PHASES * num_stages):
        sim = late(monkeypatch, num_stages, running)
        sim.run_until(24 + phase / PHASES + 0.01)
        waits.append(sim.first_step_wait())
        begun = [time for time, _ in sim.begun if time >= 18]
        assert [later - before for before, later in pairwise(begun)] == [1.0] * (len(begun) - 1)
    waited = most_s(STEP_S, 0.0) / STEP_S
    assert max(waits) <= 2 - waited + 1 / PHASES
    assert min(waits) >= 1 - waited


@pytest.mark.parametrize("launch", [0.1, 0.2, 0.3, 0.5, 0.6])
@pytest.mark.parametrize(("num_stages", "running"), [(1, 3), (2, 16), (4, 34)])
def test_however_long_launches_take_no_step_begins_later_for_it(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, running: int, launch: float
) -> None:
    """Where they leave time for it at all."""
    sim = late(monkeypatch, num_stages, running, launch=launch)
    sim.run_until(100)
    begun = [time for time, _ in sim.begun if time >= 24]
    assert max(later - before for before, later in pairwise(begun)) == pytest.approx(1.0)


@pytest.mark.parametrize(("num_stages", "running", "most"), [(1, 3, 1.12), (2, 16, 1.075)])
def test_what_makes_launches_late_is_not_taken_for_longer_steps(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, running: int, most: float
) -> None:
    """Nobody knows of it, so it costs something: else the waits would grow with what they cost."""
    sim = late(monkeypatch, num_stages, running, launch=0.5, is_told=False)
    sim.run_until(400)
    begun = [time for time, _ in sim.begun if time >= 24]
    assert (begun[-1] - begun[0]) / (len(begun) - 1) <= most


def test_steps_that_have_become_shorter_or_longer_are_waited_for_as_they_are_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = late(monkeypatch, 1, 3, launch=0.1)
    for step_time in (0.6, 1.5):
        sim.step_time = step_time
        sim.run_until(sim.now + 3 * PROBE_EVERY * step_time)
        start = sim.now
        sim.run_until(start + 20)
        begun = [time for time, _ in sim.begun if time >= start]
        assert max(later - before for before, later in pairwise(begun)) == pytest.approx(step_time)


def test_without_prompts_to_come_no_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = TimedDecode(2, running=0, late_issue=True)
    monkeypatch.setattr(decode, "time", sim)
    for _ in range(16):
        sim.add()
    sim.run_until(30)
    assert sim.scheduler.poll().again_s is None
    assert len(sim.scheduler.issuer.outstanding) == 3


def test_a_pipeline_that_has_run_empty_waits_for_nothing_until_it_knows_its_steps_again() -> None:
    late = LateIssue(enabled=True, depth=1)
    for at in range(1 + KNOWN_STEPS):
        assert late.wait_until(at * STEP_S) is None
        late.result(at * STEP_S, is_full=True)
    now_s = KNOWN_STEPS * STEP_S
    assert late.wait_until(now_s) == pytest.approx(now_s + most_s(STEP_S, 0.0), abs=1.5 * GRAIN_S)
    late.result(now_s + 2 * STEP_S, is_full=False)
    assert late.wait_until(now_s + 2 * STEP_S) is None


@pytest.mark.parametrize(
    ("step_s", "launch_s", "waited_s"),
    [
        (0.0027, 0.001, 0.4 * 0.0027),
        (0.0064, 0.001, 0.0064 - LAUNCH_S),
        (0.02, 0.0012, 0.018),
        (0.0027, 0.0017, 0.001 - MARGIN_S),
        (0.02, 0.004, 0.016 - MARGIN_S),
        (0.002, 0.004, 0.0),
    ],
)
def test_a_step_waits_as_long_as_there_is_time_for_its_launch(step_s: float, launch_s: float, waited_s: float) -> None:
    assert most_s(step_s, launch_s) == pytest.approx(waited_s)


def test_a_host_that_has_become_slow_launches_earlier() -> None:
    late = LateIssue(enabled=True, depth=1)
    for at in range(1 + KNOWN_STEPS):
        late.result(at * STEP_S, is_full=True)
    now_s = KNOWN_STEPS * STEP_S
    waits = ((0.001, STEP_S - LAUNCH_S), (0.005, STEP_S - 0.005 - MARGIN_S), (0.001, STEP_S - LAUNCH_S))
    for launch_s, waited_s in waits:
        for _ in range(KNOWN_LAUNCHES):
            late.launched(launch_s)
        assert late.wait_until(now_s) == pytest.approx(now_s + waited_s, abs=1.5 * GRAIN_S)


def test_one_slow_launch_of_many_makes_no_step_begin_earlier() -> None:
    late = LateIssue(enabled=True, depth=1)
    for at in range(1 + KNOWN_STEPS):
        late.result(at * STEP_S, is_full=True)
    for at in range(KNOWN_LAUNCHES):
        late.launched(0.005 if at % 5 == 2 else 0.001)
    now_s = KNOWN_STEPS * STEP_S
    assert late.wait_until(now_s) == pytest.approx(now_s + STEP_S - LAUNCH_S, abs=1.5 * GRAIN_S)


@pytest.mark.parametrize(("late_s", "waited_s"), [(0.005, STEP_S - 0.005 - MARGIN_S), (0.0, STEP_S - LAUNCH_S)])
def test_a_loop_that_comes_late_is_asked_to_come_earlier(late_s: float, waited_s: float) -> None:
    late = LateIssue(enabled=True, depth=1)
    for at in range(1 + KNOWN_STEPS):
        late.result(at * STEP_S, is_full=True)
    now_s = KNOWN_STEPS * STEP_S
    for at in range(KNOWN_LAUNCHES):
        due_s = late.wait_until(now_s)
        assert due_s is not None
        assert late.wait_until(due_s + (late_s if at % 4 else 0.008)) is None  # one of four comes later than most
    assert late.wait_until(now_s) == pytest.approx(now_s + waited_s, abs=1.5 * GRAIN_S)
