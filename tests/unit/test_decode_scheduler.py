"""The scheduler of a decode instance, case by case, against simulated stages."""

from __future__ import annotations

import numpy as np
import pytest

from stagemesh.shared.core.commands import FLAGS, HANDLE, TokenLogprobs
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule import admission
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import Bug
from tests.support.decode_events import finish
from tests.support.decode_request import SimRequest
from tests.support.decode_sim import DecodeSim
from tests.support.sim_stages import token_at


def reserved(sim: DecodeSim, *, prompt_tokens: int = 5, max_tokens: int = 8, stop: tuple[int, ...] = ()) -> SimRequest:
    """A request that has the pages of its prompt."""
    request = sim.new_request(prompt_tokens, SamplingParams(max_tokens=max_tokens, stop_token_ids=stop))
    sim.submit(request)
    sim.reserve(request)
    sim.poll()
    return request


def start(sim: DecodeSim, request: SimRequest) -> None:
    """Its KV and its first token are here."""
    sim.fill(request)
    while request.to_write:
        sim.write(request, 0)
    sim.commit(request)
    sim.give_first_token(request)


def started(sim: DecodeSim, *, prompt_tokens: int = 5, max_tokens: int = 8, stop: tuple[int, ...] = ()) -> SimRequest:
    request = reserved(sim, prompt_tokens=prompt_tokens, max_tokens=max_tokens, stop=stop)
    start(sim, request)
    return request


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_requests", [1, 3, 6])
def test_an_undisturbed_run(num_stages: int, num_requests: int) -> None:
    sim = DecodeSim(num_stages=num_stages, num_pages=40)
    requests = [started(sim, prompt_tokens=3 + index, max_tokens=4 + index) for index in range(num_requests)]
    sim.run_dry()
    sim.check_all_is_back()
    assert [len(request.tokens) for request in requests] == [3 + index for index in range(num_requests)]
    assert {request.end for request in requests} == {SequenceEnd.LENGTH}
    assert sim.pipeline.rows_run == {request.ref: len(request.tokens) for request in requests}  # none in vain


def test_a_step_is_issued_before_the_tokens_of_the_last_one_are_back() -> None:
    sim = DecodeSim(num_stages=1, num_pages=8)
    started(sim)
    sim.poll()
    first, second = sim.scheduler.issuer.outstanding.values()
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([token_at(RequestRef("r0", 0), 5)], [])
    assert second.source_steps == {first.number}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_microbatch_has_a_step_out_and_one_is_ahead(num_stages: int) -> None:
    sim = DecodeSim(num_stages=num_stages, num_pages=40)
    requests = [reserved(sim) for _ in range(2 * num_stages)]
    for request in requests:
        start(sim, request)
    sim.poll()
    steps = list(sim.scheduler.issuer.outstanding.values())
    assert [step.microbatch for step in steps] == [*range(num_stages), 0]
    assert {len(step.rows) for step in steps} == {2}
    finish(sim)


def first_stop(ref: RequestRef, prompt_tokens: int, at: int) -> tuple[int, ...]:
    """A stop token that ends the sequence with its `at`th new token, or nothing if that token comes earlier."""
    tokens = [token_at(ref, prompt_tokens + index) for index in range(at)]
    return () if tokens[-1] in tokens[:-1] else (tokens[-1],)


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_stop_token_wastes_one_row_at_most(at: int) -> None:
    sim = DecodeSim(num_stages=1, num_pages=8)
    prompt_tokens = next(n for n in range(1, 12) if first_stop(RequestRef("r0", 0), n, at))
    stop = first_stop(RequestRef("r0", 0), prompt_tokens, at)
    request = started(sim, prompt_tokens=prompt_tokens, max_tokens=12, stop=stop)
    sim.run_dry()
    sim.check_all_is_back()
    assert (len(request.tokens), request.end) == (at - 1, SequenceEnd.STOP)
    assert sim.pipeline.rows_run[request.ref] == at  # at - 1 that were needed, and one ahead


def test_a_first_token_that_is_the_last_runs_nothing() -> None:
    sim = DecodeSim(num_stages=2, num_pages=8)
    started(sim, max_tokens=1)
    sim.poll()
    assert (sim.checks.last_command, sim.scheduler.held["pages_used"]) == (0, 0)
    sim.check_all_is_back()


def test_pages_come_back_only_when_every_stage_has_dropped_the_sequence() -> None:
    sim = DecodeSim(num_stages=2, num_pages=2)
    request = started(sim, prompt_tokens=4, max_tokens=2)
    waiting = reserved(sim, prompt_tokens=4, max_tokens=2)
    sim.move(0)
    sim.move(1)
    sim.deliver()
    sim.poll()
    assert request.end is SequenceEnd.LENGTH
    sim.move(0)
    sim.poll()
    assert not waiting.pages  # stage 1 has not dropped it
    sim.run_dry()
    assert waiting.pages
    finish(sim)


def test_two_that_are_expected_to_need_the_whole_pool_are_not_admitted_together() -> None:
    """Neither can end before its limit, so the expectation is certain."""
    sim = DecodeSim(num_stages=1, num_pages=5, max_running=8)
    started(sim, prompt_tokens=2, max_tokens=12)
    second = reserved(sim, prompt_tokens=2, max_tokens=12)
    assert not second.pages
    finish(sim)
    assert len(second.tokens) == 11
    assert sim.scheduler.stats.retractions == 0


def test_admission_waits_for_nobody_unannounced() -> None:
    sim = DecodeSim(num_stages=1, num_pages=4, max_running=2)
    unannounced, announced = (sim.new_request(16, SamplingParams(max_tokens=1)) for _ in range(2))
    for request in (unannounced, announced):
        sim.reserve(request)
    sim.submit(announced)
    sim.poll()
    assert (unannounced.pages, len(announced.pages)) == ((), 4)
    finish(sim)


def test_no_more_are_admitted_than_may_run() -> None:
    sim = DecodeSim(num_stages=1, num_pages=20, max_running=2)
    requests = [sim.new_request(4, SamplingParams(max_tokens=3)) for _ in range(3)]
    for request in requests:
        sim.submit(request)
        sim.reserve(request)
    sim.poll()
    assert [bool(request.pages) for request in requests] == [True, True, False]
    finish(sim)


def scheduler_of(num_pages: int = 4) -> DecodeScheduler:
    return DecodeScheduler(num_pages=num_pages, page_size=4, num_microbatches=1, max_running=4)


def test_a_request_that_can_never_fit_is_rejected_by_name() -> None:
    scheduler, request = scheduler_of(), RequestRef("r", 0)
    scheduler.submit(request, SamplingParams(max_tokens=10), 8, "t")
    (output,) = scheduler.poll().outputs
    assert (output.request, output.end) == (request, SequenceEnd.REJECTED)
    assert output.error == "max_tokens: prompt and new tokens need 17 tokens, the pool holds 16"
    scheduler.submit(request, SamplingParams(max_tokens=9), 8, "t")
    assert (scheduler.poll().outputs, scheduler.held["sequences"]) == ([], 1)


def test_a_request_that_comes_twice_is_rejected_and_the_first_lives_on() -> None:
    scheduler, request = scheduler_of(), RequestRef("r", 0)
    scheduler.submit(request, SamplingParams(max_tokens=2), 4, "t1")
    scheduler.submit(request, SamplingParams(max_tokens=2), 4, "t2")
    assert scheduler.poll().outputs == [SequenceOutput(request, end=SequenceEnd.REJECTED, error="duplicate request")]
    scheduler.reserve("t1", request)
    assert [admission.ticket_id for admission in scheduler.poll().admissions] == ["t1"]


def test_what_is_late_or_unknown_is_dropped() -> None:
    scheduler, request = scheduler_of(), RequestRef("r", 1)
    scheduler.first_token(request, 3)
    assert scheduler.abort(request) is None
    assert not scheduler.commit("t")
    scheduler.close_ticket("t", quiesced=True, reason="late")
    scheduler.cancel_reserve("t")
    assert scheduler.poll().outputs == []
    assert not any(scheduler.held.values())


def test_an_attempt_is_not_the_attempt_before() -> None:
    scheduler = scheduler_of()
    scheduler.submit(RequestRef("r", 1), SamplingParams(max_tokens=2), 4, "t1")
    scheduler.first_token(RequestRef("r", 0), 3)
    assert scheduler.abort(RequestRef("r", 0)) is None
    scheduler.reserve("t0", RequestRef("r", 1))  # the ticket of another attempt
    assert scheduler.poll().admissions == []


def test_a_commit_that_is_told_twice_starts_once() -> None:
    sim = DecodeSim(num_stages=1, num_pages=8)
    request = started(sim)
    assert not sim.scheduler.commit(request.ticket_id)
    finish(sim)


def test_pages_of_a_failed_ticket_wait_for_the_proof() -> None:
    sim = DecodeSim(num_stages=1, num_pages=4)
    request = reserved(sim, prompt_tokens=8, max_tokens=2)
    sim.fill(request)
    sim.close_ticket(request, quiesced=False)
    sim.poll()
    assert (request.end, sim.scheduler.held["pages_quarantined"]) == (SequenceEnd.FAILED, 2)
    sim.close_ticket(request, quiesced=True)
    assert (sim.scheduler.held["pages_quarantined"], sim.scheduler.load.pages_free) == (0, 4)
    finish(sim)


def test_pages_in_quarantine_are_promised_to_nobody() -> None:
    sim = DecodeSim(num_stages=1, num_pages=4)
    failed = reserved(sim, prompt_tokens=8, max_tokens=2)
    sim.fill(failed)
    sim.close_ticket(failed, quiesced=False)
    first, second = (reserved(sim, prompt_tokens=4, max_tokens=5) for _ in range(2))  # two pages each in the end
    assert (len(first.pages), second.pages) == (1, ())
    finish(sim)


def test_what_quarantine_keeps_from_fitting_an_empty_instance_lets_everybody_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "LOOK_PAST_S", 0.0)
    sim = DecodeSim(num_stages=1, num_pages=8)
    failed = reserved(sim, prompt_tokens=4, max_tokens=2)
    sim.fill(failed)
    sim.close_ticket(failed, quiesced=False)
    large = reserved(sim, prompt_tokens=4, max_tokens=29)  # the whole pool in the end
    small = [reserved(sim, prompt_tokens=4, max_tokens=2) for _ in range(3)]  # two pages each
    assert not large.pages
    assert all(request.pages for request in small)
    finish(sim)
    assert large.end is SequenceEnd.LENGTH


def test_an_abort_after_the_last_write_gets_its_pages_back_with_the_commit() -> None:
    sim = DecodeSim(num_stages=1, num_pages=4)
    request = reserved(sim, prompt_tokens=8, max_tokens=2)
    sim.fill(request)
    sim.abort(request)
    assert sim.scheduler.held["pages_quarantined"] == 2
    while request.to_write:
        sim.write(request, 0)
    sim.commit(request)
    assert sim.scheduler.load.pages_free == 4
    sim.check_all_is_back()


def test_the_tokens_of_an_aborted_sequence_are_dropped() -> None:
    sim = DecodeSim(num_stages=1, num_pages=8)
    request = started(sim)
    sim.poll()
    sim.abort(request)
    sim.run_dry()
    assert request.tokens == []
    sim.check_all_is_back()


def test_log_probabilities_go_with_their_tokens() -> None:
    sim = DecodeSim(num_stages=1, num_pages=8, run_ahead=0)
    asks, asks_not = reserved(sim, max_tokens=2), reserved(sim, max_tokens=2)
    for request in (asks, asks_not):
        start(sim, request)
    sim.poll()
    said = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5))
    sim.scheduler.result(1, np.array([token_at(r.ref, 6) for r in (asks, asks_not)]), {0: said})
    assert [(output.request, output.logprobs) for output in sim.scheduler.poll().outputs] == [
        (asks.ref, (said,)),
        (asks_not.ref, ()),
    ]


def test_a_result_that_nobody_waits_for_is_a_bug() -> None:
    sim = DecodeSim(num_stages=1, num_pages=8)
    started(sim)
    sim.poll()
    step = next(iter(sim.scheduler.issuer.outstanding.values()))
    assert step.rows[0, HANDLE] == 1
    assert step.rows[0, FLAGS]
    with pytest.raises(Bug, match="step 99"):
        sim.scheduler.result(99, step.tokens)
