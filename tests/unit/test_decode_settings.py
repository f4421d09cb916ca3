"""What can be set while a decode scheduler runs, and what its stages were not built for."""

from __future__ import annotations

import math

import pytest

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.decode_settings import StepRoom
from stagemesh.shared.errors import Rejected
from tests.support.decode_events import finish
from tests.support.decode_sim import DecodeSim


def scheduler(room: StepRoom | None) -> DecodeScheduler:
    return DecodeScheduler(
        num_pages=64, page_size=4, num_microbatches=2, max_running=8, run_ahead=1, pp_size=2, room=room
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("extra_depth", 2, r"^extra_depth: must be a whole number in 0..1: engine.ring_slots holds no more, got 2"),
        ("extra_depth", -1, r"^extra_depth: must be a whole number in 0..1"),
        ("extra_depth", 0.5, r"^extra_depth: must be a whole number"),
        ("max_running", 9, r"^max_running: must be a whole number in 1..8: the stages were started for no more, got 9"),
        ("max_running", 0, r"^max_running: must be a whole number in 1..8"),
        ("max_running", math.nan, r"^max_running: must be a whole number"),
        ("max_running", math.inf, r"^max_running: must be a whole number"),
        ("page_size", 1, r"^setting: must be one of schedule_conservativeness, extra_depth, max_running, got"),
    ],
)
def test_what_is_out_of_its_limits_changes_nothing(name: str, value: float, message: str) -> None:
    made = scheduler(StepRoom(steps=4, rows=4, sequences=8))
    before = dict(made.settings.values)
    with pytest.raises(Rejected, match=message):
        made.settings.set(name, value)
    assert made.settings.values == before == {"schedule_conservativeness": 1, "extra_depth": 0, "max_running": 8}


def test_fewer_microbatches_need_fewer_sequences_first_where_a_step_has_few_rows() -> None:
    made = scheduler(StepRoom(steps=4, rows=3, sequences=8))
    with pytest.raises(Rejected, match=r"^max_running: 8 sequences in 2 microbatches are 4 rows a step, .* takes 3"):
        made.settings.set("max_running", 8)
    assert made.settings.set("extra_depth", 1) == 0
    assert made.settings.set("max_running", 8) == 8
    with pytest.raises(Rejected, match=r"^extra_depth: 8 sequences in 2 microbatches are 4 rows a step"):
        made.settings.set("extra_depth", 0)
    made.settings.set("max_running", 6)
    assert made.settings.set("extra_depth", 0) == 1


def test_those_that_have_pages_and_do_not_run_yet_are_rows_to_come() -> None:
    made = scheduler(StepRoom(steps=4, rows=3, sequences=8))
    made.settings.set("extra_depth", 1)
    for number in range(8):
        request = RequestRef(f"r{number}", 1)
        made.submit(request, SamplingParams(max_tokens=20), 4, f"t{number}")
        made.reserve(f"t{number}", request)
    assert len(made.poll().admissions) == 8
    made.settings.set("max_running", 6)
    with pytest.raises(Rejected, match=r"^extra_depth: 8 sequences in 2 microbatches are 4 rows a step"):
        made.settings.set("extra_depth", 0)


def test_more_and_fewer_microbatches_under_way_and_every_answer_is_whole() -> None:
    sim = DecodeSim(num_stages=2, num_pages=64, max_running=8, extra_depth=1)
    for _ in range(8):
        sim.new_request(4, SamplingParams(max_tokens=30))
    for depth in (2, 0, 1):
        for request in sim.requests:
            assert request is not None
        sim.crank(6)
        sim.set_extra_depth(depth)
    finish(sim)


def test_fewer_may_run_from_now_on_and_those_that_run_go_on() -> None:
    sim = DecodeSim(num_stages=1, num_pages=64, max_running=6)
    sim.scheduler.settings.set("max_running", 2)
    assert sim.scheduler.slots_free == 2
    for _ in range(6):
        sim.new_request(4, SamplingParams(max_tokens=5))
    finish(sim)
