"""Decode holds its steps for prompts that are being computed, up to a bound."""

from __future__ import annotations

import pytest

from stagemesh.shared.core.commands import FLAGS, FROM_STEP
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule import decode
from stagemesh.shared.engine.schedule.yielding import YieldPolicy
from tests.support.decode_request import SimRequest
from tests.support.decode_sim import DecodeSim


def test_without_a_bound_nothing_is_held() -> None:
    policy = YieldPolicy(0.0)
    assert not policy.holds(1.0, filling=True)
    assert policy.again_s is None


def test_steps_are_held_while_prompts_are_computed() -> None:
    policy = YieldPolicy(2.0)
    assert policy.holds(10.0, filling=True)
    assert policy.again_s == 12.0
    assert policy.holds(11.9, filling=True)
    assert not policy.holds(11.95, filling=False)
    assert policy.again_s is None


def test_after_the_bound_steps_run_until_no_prompt_is_computed() -> None:
    policy = YieldPolicy(2.0)
    assert policy.holds(10.0, filling=True)
    assert not policy.holds(12.0, filling=True)
    assert not policy.holds(15.0, filling=True)
    assert not policy.holds(15.1, filling=False)
    assert policy.holds(15.2, filling=True), "a new burst may be waited for"


class Clock:
    """Stands still until it is set."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def begun(sim: DecodeSim) -> SimRequest:
    request = sim.new_request(5, SamplingParams(max_tokens=8))
    sim.submit(request)
    sim.reserve(request)
    sim.poll()
    sim.fill(request)
    return request


def join(sim: DecodeSim, request: SimRequest) -> None:
    while request.to_write:
        sim.write(request, 0)
    sim.commit(request)
    sim.give_first_token(request)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(decode, "time", clock)
    return clock


def test_a_scheduler_holds_its_steps_for_a_prompt_that_is_being_computed(clock: Clock) -> None:
    sim = DecodeSim(num_stages=1, num_pages=40, yield_s=2.0)
    first, second = begun(sim), begun(sim)
    join(sim, first)
    sim.poll()
    assert not sim.scheduler.issuer.outstanding, "the second prompt is about to join it"
    join(sim, second)
    sim.poll()
    (step, *_) = sim.scheduler.issuer.outstanding.values()
    assert len(step.rows) == 2
    sim.run_dry()
    sim.check_all_is_back()


def test_a_scheduler_asks_to_be_polled_when_its_patience_ends(clock: Clock) -> None:
    sim = DecodeSim(num_stages=1, num_pages=40, yield_s=2.0)
    first, _ = begun(sim), begun(sim)
    join(sim, first)
    assert sim.scheduler.poll().again_s == 102.0
    clock.now_s = 102.0
    actions = sim.scheduler.poll()
    assert actions.again_s is None
    assert any(command.step is not None for command in actions.commands)


def test_an_id_that_is_back_is_sent_as_it_is() -> None:
    """Ids that no step in flight has sampled need not lie on a device any more."""
    sim = DecodeSim(num_stages=1, num_pages=40, run_ahead=0)
    join(sim, begun(sim))
    sim.poll()
    seen = []
    while sim.scheduler.issuer.outstanding:
        (step,) = sim.scheduler.issuer.outstanding.values()
        seen.append(bool(step.rows[0, FLAGS] & FROM_STEP))
        sim.crank()
    assert seen
    assert not any(seen)
