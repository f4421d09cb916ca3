"""The scheduler of a prefill instance, case by case, against simulated stages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagemesh.shared.core.commands import COUNT, HANDLE, START, Step, TokenLogprobs
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.engine.schedule.prefill_state import FailedTicket
from stagemesh.shared.errors import Bug
from tests.support.prefill_events import events, finish
from tests.support.prefill_prompt import SimPrompt
from tests.support.prefill_sim import PrefillSim
from tests.support.sim_stages import VOCAB_SIZE, token_at


def parts(step: Step) -> list[tuple[int, int, int]]:
    """Handle, start and count of each row."""
    return [(row[HANDLE], row[START], row[COUNT]) for row in step.rows.tolist()]


def ready(sim: PrefillSim, num_tokens: int, group: str = "d") -> SimPrompt:
    """A prompt whose pages are reserved and whose writes are announced: the next poll starts it."""
    prompt = sim.submit(num_tokens, group=group)
    sim.poll()
    sim.reserved(prompt)
    sim.poll()
    sim.filled(prompt)
    return prompt


def test_a_chunk_packs_several_prompts_and_a_long_one_goes_on_in_the_next() -> None:
    sim = PrefillSim(num_stages=2, num_pages=20, chunk_size=8)
    for num_tokens in (3, 2, 9):
        sim.submit(num_tokens, ticket=False)
    sim.poll()
    assert [parts(step) for step in sim.chunks] == [[(1, 0, 3), (2, 0, 2), (3, 0, 3)], [(3, 3, 6)]]
    finish(sim)


def test_a_prompt_under_way_comes_before_new_ones() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=4, run_ahead=0)
    sim.submit(7, ticket=False)
    sim.poll()
    sim.submit(2, ticket=False)
    sim.crank()
    assert [parts(step) for step in sim.chunks] == [[(1, 0, 4)], [(1, 4, 3), (2, 0, 1)]]
    finish(sim)


@pytest.mark.parametrize(("num_stages", "run_ahead"), [(1, 0), (1, 1), (3, 1), (2, 2)])
def test_the_window_of_steps_outstanding(num_stages: int, run_ahead: int) -> None:
    sim = PrefillSim(num_stages=num_stages, num_pages=20, chunk_size=2, run_ahead=run_ahead)
    sim.submit(40, ticket=False)
    sim.poll()
    assert len(sim.chunks) == num_stages + run_ahead
    sim.move(0)
    sim.poll()
    assert len(sim.chunks) == num_stages + run_ahead  # only a result makes room
    finish(sim)
    assert len(sim.chunks) == 20


def test_pages_are_asked_for_and_writes_announced_before_the_first_chunk() -> None:
    sim = PrefillSim(num_stages=2, num_pages=20)
    prompt = sim.submit(5)
    actions = sim.poll()
    assert (actions.reserve, actions.fill, actions.commands) == (["t0"], [], [])
    sim.reserved(prompt)
    actions = sim.poll()
    assert (actions.reserve, actions.fill, actions.commands) == ([], ["t0"], [])
    assert sim.poll().commands == []
    sim.filled(prompt)
    (command,) = sim.poll().commands
    assert [join.send for join in command.joins] == [prompt.plan]
    finish(sim)


def test_pages_are_asked_for_the_next_prompts_only() -> None:
    """Two chunks' worth a decode instance, and `reserve_ahead` prompts at least."""
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=8, reserve_ahead=2)
    for _ in range(4):
        sim.submit(6, group="short")
    for _ in range(4):
        sim.submit(20, group="long")
    assert sim.poll().reserve == ["t0", "t1", "t2", "t4", "t5"]
    assert sim.poll().reserve == []
    finish(sim)


def test_a_prompt_that_got_no_pages_asks_again() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20)
    prompt = sim.submit(5)
    sim.poll()
    sim.no_pages(prompt)
    assert sim.poll().reserve == ["t0"]
    finish(sim)


def test_a_prompt_that_has_pages_does_not_wait_for_one_before_it_that_has_none() -> None:
    """Else, where the decode side could hold either but not both, neither would ever start."""
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=8)
    first, second = sim.submit(12), sim.submit(6)
    assert sim.poll().reserve == ["t0", "t1"]
    sim.no_pages(first)
    sim.reserved(second)
    actions = sim.poll()
    assert (actions.reserve, actions.fill) == (["t0"], ["t1"])


def test_prompts_for_another_decode_instance_do_not_wait() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=8)
    sim.submit(20, group="full")
    other = sim.submit(6, group="free")
    sim.poll()
    sim.reserved(other)
    assert sim.poll().fill == ["t1"]
    finish(sim)


def test_nobody_starts_before_one_that_waits_for_pages_here() -> None:
    sim = PrefillSim(num_stages=1, num_pages=4, chunk_size=32)
    sim.submit(12, ticket=False)
    sim.submit(8, ticket=False)
    sim.submit(4, ticket=False)
    sim.poll()
    assert [parts(step) for step in sim.chunks] == [[(1, 0, 12)]]
    sim.run_dry()
    assert parts(sim.chunks[1]) == [(2, 0, 8), (3, 0, 4)]
    finish(sim)


def test_no_more_prompts_hold_pages_than_allowed() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, max_sequences=2, chunk_size=32)
    for _ in range(3):
        ready(sim, 4)
    sim.poll()
    assert sim.scheduler.load.running == 2
    sim.run_dry()
    assert sim.scheduler.load.running == 0
    assert sim.scheduler.load.waiting == 1  # the other two have their token, but still send
    finish(sim)


def test_pages_come_back_when_every_stage_has_settled_whatever_the_order() -> None:
    sim = PrefillSim(num_stages=3, num_pages=4)
    ready(sim, 8)
    sim.run_dry()
    while possible := events(sim, "write"):
        possible[0]()
    for left in (2, 1, 0):
        assert sim.scheduler.load.pages_free == 2
        events(sim, "settle")[left]()
        sim.deliver_settled(0)
        sim.run_dry()
    assert sim.scheduler.load.pages_free == 4
    sim.check_all_is_back()


def test_pages_wait_for_the_step_that_is_out_even_if_all_stages_have_settled() -> None:
    sim = PrefillSim(num_stages=1, num_pages=4)
    prompt = ready(sim, 4)
    sim.poll()
    sim.move(0)
    sim.write(0, 1)
    sim.settle(0, 1)
    sim.deliver_settled(0)
    sim.poll()
    assert sim.scheduler.held["pages_used"] == 1
    sim.run_dry()
    assert len(prompt.outputs) == 1
    sim.check_all_is_back()


@pytest.mark.parametrize("at", ["waiting", "asked", "reserved", "announced", "filled", "running", "sampled"])
@pytest.mark.parametrize("how", ["abort", "ticket_failed"])
def test_an_end_in_every_state_leaves_nothing(at: str, how: str) -> None:
    sim = PrefillSim(num_stages=2, num_pages=8, chunk_size=4)
    prompt = sim.submit(10)
    ways: dict[str, Callable[[], object]] = {
        "asked": sim.poll,
        "reserved": lambda: sim.reserved(prompt),
        "announced": sim.poll,
        "filled": lambda: sim.filled(prompt),
        "running": sim.poll,
        "sampled": sim.run_dry,
    }
    for state in (list(ways)[: list(ways).index(at) + 1]) if at in ways else ():
        ways[state]()
    quiescent = at not in ("running", "sampled")
    getattr(sim, how)(prompt)
    actions = sim.poll()
    assert actions.fail == ([FailedTicket("t0", quiescent=quiescent)] if how == "abort" else [])
    assert any(command.cancels for command in actions.commands) == (not quiescent)
    if at == "sampled":
        assert [output.end for output in prompt.outputs] == [None]
    else:
        assert [output.end for output in prompt.outputs] == ([SequenceEnd.FAILED] if how == "ticket_failed" else [])
    finish(sim)


def test_a_ticket_is_cancelled_once_however_often_it_ends() -> None:
    sim = PrefillSim(num_stages=2, num_pages=8, chunk_size=4)
    prompt = ready(sim, 10)
    sim.poll()
    for _ in range(2):
        sim.abort(prompt)
        sim.ticket_failed(prompt)
    assert [command.cancels for command in sim.poll().commands] == [(1,)]
    finish(sim)


def test_a_prompt_without_a_ticket_is_over_with_its_token() -> None:
    sim = PrefillSim(num_stages=2, num_pages=8)
    prompt = sim.submit(6, ticket=False)
    sim.run_dry()
    token = token_at(prompt.ref, 6)
    assert prompt.outputs == [SequenceOutput(prompt.ref, (token,), SequenceEnd.LENGTH)]
    sim.check_all_is_back()


def test_log_probabilities_go_with_the_first_token() -> None:
    sim = PrefillSim(num_stages=1, num_pages=8, chunk_size=8)
    prompts = [sim.submit(num_tokens, ticket=False) for num_tokens in (2, 3)]
    sim.poll()
    said = TokenLogprobs(-0.5)
    sim.scheduler.result(1, np.array([4, 5]), {1: said})
    assert sim.scheduler.poll().outputs == [
        SequenceOutput(prompts[0].ref, (4,), SequenceEnd.LENGTH),
        SequenceOutput(prompts[1].ref, (5,), SequenceEnd.LENGTH, logprobs=(said,)),
    ]


def test_a_first_token_that_stops_says_so() -> None:
    sim = PrefillSim(num_stages=1, num_pages=8)
    prompt = sim.submit(6, SamplingParams(max_tokens=8, stop_token_ids=tuple(range(VOCAB_SIZE))))
    finish(sim)
    assert [output.end for output in prompt.outputs] == [SequenceEnd.STOP]


@pytest.mark.parametrize("num_tokens", [0, 33])
def test_a_prompt_that_can_never_fit_is_rejected_by_name(num_tokens: int) -> None:
    sim = PrefillSim(num_stages=1, num_pages=8)
    prompt = sim.submit(num_tokens)
    sim.poll()
    error = "prompt: must have 1..32 tokens"
    assert prompt.outputs == [SequenceOutput(prompt.ref, end=SequenceEnd.REJECTED, error=error)]
    sim.check_all_is_back()


def scheduler_of() -> PrefillScheduler:
    return PrefillScheduler(
        num_pages=8, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=2, run_ahead=1
    )


def test_a_request_that_comes_twice_is_rejected_and_the_first_lives_on() -> None:
    scheduler, request = scheduler_of(), RequestRef("r", 0)
    tokens = np.arange(4)
    for ticket_id in ("t1", "t2"):
        scheduler.submit(request, SamplingParams(max_tokens=2), tokens, ticket_id)
    actions = scheduler.poll()
    assert actions.outputs == [SequenceOutput(request, end=SequenceEnd.REJECTED, error="duplicate request")]
    assert actions.reserve == ["t1"]


def test_what_is_late_or_unknown_is_dropped() -> None:
    scheduler = scheduler_of()
    scheduler.reserved("t", (1,), ())
    scheduler.filled("t")
    scheduler.ask_again("t")
    scheduler.settled("t", 0)
    scheduler.abort(RequestRef("r", 0))
    assert scheduler.ticket_failed("t", "late")
    actions = scheduler.poll()
    assert (actions.commands, actions.outputs) == ([], [])
    assert (actions.reserve, actions.fill, actions.fail) == ([], [], [])
    assert not any(scheduler.held.values())
    with pytest.raises(Bug, match="step 1"):
        scheduler.result(1, np.zeros(1, dtype=np.int64))


def test_load_counts_what_waits_and_what_runs() -> None:
    sim = PrefillSim(num_stages=1, num_pages=20, chunk_size=8, run_ahead=0)
    sim.submit(12, ticket=False)
    sim.submit(3)
    load = sim.scheduler.load
    assert (load.waiting, load.running, load.waiting_tokens, load.pages_free) == (2, 0, 15, 20)
    sim.poll()
    load = sim.scheduler.load
    assert (load.waiting, load.running, load.waiting_tokens, load.pages_free) == (1, 1, 7, 17)
    finish(sim)
