"""What a decode scheduler does when pages run out, event by event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.describe import describe_decode
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.engine.schedule.waiting import Reason, waiting
from stagemesh.shared.errors import Bug, Rejected
from stagemesh.shared.fsm.sequence import SequenceState
from tests.support.decode_events import finish
from tests.support.decode_request import SimRequest
from tests.support.decode_sim import DecodeSim
from tests.unit.test_decode_scheduler import reserved, start, started

FAR_S = 1e12


def state_of(sim: DecodeSim, request: SimRequest) -> SequenceState | None:
    sequence = sim.scheduler.sequences.of_request(request.ref)
    return None if sequence is None else sequence.state


def until(condition: Callable[[], bool], act: Callable[[], None]) -> None:
    for _ in range(500):
        if condition():
            return
        act()
    raise AssertionError("it never comes to that")


class Squeeze:
    """Two that run, in a pool that holds one and a half of them; the second is retracted, and no stage has copied."""

    def __init__(self, sampling: SamplingParams | None = None, *, host_pages: int = 100) -> None:
        self.sim = DecodeSim(num_stages=2, num_pages=12, host_pages=host_pages, conservativeness=0.1)
        self.first = started(self.sim, prompt_tokens=4, max_tokens=40)
        self.second = self.sim.new_request(4, sampling or SamplingParams(max_tokens=40))
        self.sim.submit(self.second)
        self.sim.reserve(self.second)
        self.sim.poll()
        start(self.sim, self.second)
        until(lambda: self.given_way, self.step)

    @property
    def given_way(self) -> bool:
        return state_of(self.sim, self.second) is not SequenceState.RUNNING

    def step(self) -> None:
        """The stages move; what they copy takes longer."""
        for rank in self.sim.pipeline.movable():
            self.sim.move(rank)
        while self.sim.pipeline.inbox:
            self.sim.deliver()
        self.sim.poll()

    def copy(self) -> None:
        """All stages do."""
        until(lambda: not any(s.copying for s in self.sim.scheduler.sequences), self._copy_some)

    def _copy_some(self) -> None:
        self.step()
        for rank in self.sim.pipeline.copying():
            self.sim.finish_copy(rank)
        while self.sim.pipeline.copied:
            self.sim.deliver_copied()

    def until_restoring(self) -> None:
        self.copy()
        until(lambda: any(s.restoring for s in self.sim.scheduler.sequences), self.step)


def test_the_second_is_retracted_and_resumed_and_both_are_as_if_nothing_had_been() -> None:
    squeeze = Squeeze()
    assert state_of(squeeze.sim, squeeze.first) is SequenceState.RUNNING
    assert state_of(squeeze.sim, squeeze.second) is SequenceState.RETRACTED
    finish(squeeze.sim)
    stats = squeeze.sim.scheduler.stats
    assert (stats.retractions, stats.resumed, stats.recomputed) == (1, 1, 0)
    assert stats.retracted.count == 1
    assert squeeze.sim.checks.num_resumed == 1
    assert squeeze.sim.scheduler.issuer.outstanding == {}


def test_its_pages_are_free_when_every_stage_has_copied_them() -> None:
    squeeze = Squeeze()
    sim = squeeze.sim
    until(lambda: sim.pipeline.copying() == [0, 1], squeeze.step)
    free = sim.scheduler.pages.num_free
    sim.finish_copy(0)
    sim.deliver_copied()
    assert sim.scheduler.pages.num_free == free
    assert sim.scheduler.held["copies"] == 1
    sim.finish_copy(1)
    sim.deliver_copied()
    assert sim.scheduler.pages.num_free > free
    assert (sim.scheduler.held["copies"], sim.scheduler.held["host_pages"] > 0) == (0, True)
    finish(sim)


@pytest.mark.parametrize("where", ["copying", "host", "restoring"])
def test_an_abort_frees_the_copy_wherever_it_is(where: str) -> None:
    squeeze = Squeeze()
    sim = squeeze.sim
    if where == "host":
        squeeze.copy()
    if where == "restoring":
        squeeze.until_restoring()
    sim.abort(squeeze.second)
    finish(sim)  # the simulated stages find out a drop that comes during a copy
    assert sim.scheduler.host_pages_used == 0


def test_a_result_that_was_on_its_way_counts_and_may_end_it() -> None:
    probe = Squeeze()
    retracted = next(s for s in probe.sim.scheduler.sequences if s.copying)
    assert retracted.in_flight
    stop = probe.second.expected[0][retracted.issued - 1]  # what its last step samples
    squeeze = Squeeze(SamplingParams(max_tokens=40, stop_token_ids=(stop,), min_tokens=retracted.issued - 1))
    finish(squeeze.sim)
    stats = squeeze.sim.scheduler.stats
    assert (squeeze.second.end, len(squeeze.second.tokens)) == (SequenceEnd.STOP, retracted.issued - 1)
    assert (stats.retractions, stats.resumed, stats.retracted.count) == (1, 0, 0)


def test_without_room_in_host_memory_it_ends_and_is_to_be_computed_anew() -> None:
    squeeze = Squeeze(host_pages=2)
    assert squeeze.second.end is SequenceEnd.RECOMPUTE
    made = len(squeeze.second.tokens)
    again = squeeze.sim.requests[-1]
    assert (again.recompute, again.prompt_tokens) == (True, 4 + 1 + made)
    finish(squeeze.sim)
    stats = squeeze.sim.scheduler.stats
    assert (stats.retractions, stats.recomputed) == (0, 1)
    assert stats.recomputed_tokens >= 4 + made
    assert squeeze.second.tokens + again.expected[0] == squeeze.second.expected[0][1:]


def test_a_copy_that_was_not_ordered_is_a_bug() -> None:
    squeeze = Squeeze()
    handle = next(s.handle for s in squeeze.sim.scheduler.sequences if s.copying)
    with pytest.raises(Bug, match="not told to"):
        squeeze.sim.scheduler.copied(handle, 0, restored=True)
    with pytest.raises(Bug, match="not told to"):
        squeeze.sim.scheduler.copied(handle, 2, restored=False)
    with pytest.raises(Bug, match="no sequence 99"):
        squeeze.sim.scheduler.copied(99, 0, restored=False)
    finish(squeeze.sim)


@pytest.mark.parametrize("num_pages", range(12, 18))
def test_the_last_page_is_the_oldests(num_pages: int) -> None:
    """The pages of those that give way never come, as their copies never end: the others run on to the last page."""
    sim = DecodeSim(num_stages=2, num_pages=num_pages, host_pages=100, conservativeness=0.0)
    young, old, _ = (sim.new_request(4, SamplingParams(max_tokens=40)) for _ in range(3))
    old.arrived_s -= 60.0
    for request in (young, old, sim.requests[2]):
        sim.submit(request)
        sim.reserve(request)
        sim.poll()
        start(sim, request)

    def move() -> None:
        for rank in sim.pipeline.movable():
            sim.move(rank)
        while sim.pipeline.inbox:
            sim.deliver()
        sim.poll()

    until(lambda: not any(sim.pipeline.queues) and not sim.scheduler.issuer.outstanding, move)
    assert sim.scheduler.pages.num_free == 0
    issued = {s.request: s.issued for s in sim.scheduler.sequences}
    assert issued[old.ref] == max(issued.values())
    finish(sim)


def pressed(*, filling: bool = False) -> tuple[DecodeSim, SimRequest]:
    """Two run, a third has pages that are wanted back."""
    sim = DecodeSim(num_stages=1, num_pages=14, conservativeness=0.0)
    for _ in range(2):
        started(sim, prompt_tokens=4, max_tokens=30)
    third = reserved(sim, prompt_tokens=12, max_tokens=12)
    assert third.pages
    if filling:
        sim.fill(third)
    until(lambda: third.in_question, sim.crank)
    return sim, third


def test_pages_that_nobody_fills_are_asked_back_before_anybody_is_retracted() -> None:
    sim, third = pressed()
    sim.decide(third)
    assert not third.pages
    sim.reserve(third)  # it asks again, and is told when this side has the broker's word
    sim.poll()
    assert not third.pages
    sim.tell_verdict(third)
    assert sim.scheduler.stats.reservations_cancelled == 1
    assert state_of(sim, third) is SequenceState.WAITING
    sim.poll()
    assert sim.scheduler.stats.retractions == 0
    finish(sim)
    assert third.end is SequenceEnd.LENGTH


def test_pages_that_are_filled_stay_and_somebody_else_gives_way() -> None:
    sim, third = pressed(filling=True)
    pages = third.pages
    sim.decide(third)
    sim.tell_verdict(third)
    assert third.pages == pages
    sim.poll()
    assert sim.scheduler.stats.retractions == 1
    finish(sim)


def test_one_that_has_just_joined_joins_its_stages_before_it_leaves_them() -> None:
    sim, third = pressed(filling=True)
    while third.to_write:
        sim.write(third, 0)
    sim.commit(third)
    sim.give_first_token(third)
    before = sim.checks.last_command
    sim.poll()
    assert state_of(sim, third) is SequenceState.RETRACTED
    assert sim.checks.last_command >= before + 2
    sim.decide(third)
    sim.tell_verdict(third)  # too late to matter
    finish(sim)


def test_asked_again_for_pages_that_it_has_a_ticket_gets_the_same() -> None:
    sim, third = pressed()
    pages = third.pages
    sim.reserve(third)
    sim.poll()
    assert third.asked  # they are in question
    sim.decide(third)
    sim.tell_verdict(third)
    sim.poll()
    assert (third.asked, third.pages) == (False, pages)
    finish(sim)


def test_the_setting_counts_from_the_next_poll_on() -> None:
    sim = DecodeSim(num_stages=1, num_pages=12, conservativeness=1.0)
    started(sim, prompt_tokens=4, max_tokens=30)
    second = reserved(sim, prompt_tokens=4, max_tokens=30)
    assert not second.pages
    sim.scheduler.schedule_conservativeness = 0.1
    assert sim.scheduler.schedule_conservativeness == 0.1
    sim.poll()
    assert second.pages
    with pytest.raises(Rejected, match="schedule_conservativeness"):
        sim.scheduler.schedule_conservativeness = 11.0
    finish(sim)


def test_why_they_wait_is_told_by_reason() -> None:
    squeeze = Squeeze()
    sim = squeeze.sim
    sim.submit(sim.new_request(4, SamplingParams(max_tokens=3)))
    reserved(sim, prompt_tokens=4, max_tokens=30)
    told = waiting(sim.scheduler, FAR_S)
    assert {reason: found.count for reason, found in told.items() if found.count} == {
        Reason.COPYING: 1,
        Reason.PREFILL: 1,
        Reason.PAGES: 1,
    }
    assert told[Reason.COPYING].oldest_s > FAR_S / 2
    squeeze.copy()
    assert waiting(sim.scheduler, FAR_S)[Reason.RESUME].count == 1
    finish(sim)


def test_one_that_waits_for_others_to_end_says_so() -> None:
    sim = DecodeSim(num_stages=1, num_pages=20, max_running=1)
    reserved(sim, max_tokens=3)
    reserved(sim, max_tokens=3)
    assert waiting(sim.scheduler, FAR_S)[Reason.SLOTS].count == 1
    assert "as many run as may" in "".join(e.waits_for for e in describe_decode(sim.scheduler, "decode-0", FAR_S))
    finish(sim)


def rows_a_step(sim: DecodeSim) -> float:
    """Of a crowd that needs a little less than there is."""
    rows = sim.scheduler.stats.step_rows
    count, total = rows.count, rows.total
    requests = [reserved(sim, prompt_tokens=4, max_tokens=20) for _ in range(4)]
    for request in requests:
        start(sim, request)
    finish(sim)
    return (rows.total - total) / (rows.count - count)


def test_after_a_storm_steps_are_as_full_as_before_it() -> None:
    sim = DecodeSim(num_stages=2, num_pages=24, host_pages=6, conservativeness=0.1)
    before = rows_a_step(sim)
    for _ in range(6):
        reserved(sim, prompt_tokens=8, max_tokens=60)
    finish(sim)
    stats = sim.scheduler.stats
    assert stats.retractions + stats.recomputed > 2
    assert rows_a_step(sim) == before
