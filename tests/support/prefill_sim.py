"""A prefill instance without torch, broker or router: a scheduler, its stages, and what each of them sends.

Events come one at a time, in whatever order the test likes; everything that must hold is checked after each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stagemesh.shared.core.commands import (
    COUNT,
    FLAGS,
    HANDLE,
    ROW_WIDTH,
    SAMPLE,
    SOURCE_ROW,
    SOURCE_STEP,
    START,
    Command,
    Join,
    SendPlan,
    Step,
)
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput, end_after
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.engine.schedule.prefill_state import FailedTicket, PrefillActions
from tests.support.prefill_prompt import TARGETS, Family, SimPrompt, ref_of
from tests.support.prefill_senders import SimSender
from tests.support.sim_stages import SimPipeline, token_at


class PrefillSim:
    """`prompts` by number. A method is one event; it returns when everything that must hold still does."""

    def __init__(
        self,
        *,
        num_stages: int,
        num_pages: int,
        page_size: int = 4,
        chunk_size: int = 8,
        max_sequences: int = 4,
        run_ahead: int = 1,
        **settings: Any,
    ) -> None:
        self.page_size, self.chunk_size, self.max_sequences = page_size, chunk_size, max_sequences
        self.max_steps = num_stages + run_ahead
        self.scheduler = PrefillScheduler(
            num_pages=num_pages,
            page_size=page_size,
            pp_size=num_stages,
            chunk_size=chunk_size,
            max_sequences=max_sequences,
            run_ahead=run_ahead,
            **{"reserve_ahead": 2, **settings},
        )
        shared = settings.get("prefix_cache", True)
        self.pipeline = SimPipeline(num_stages, num_pages, page_size, shared=shared)
        self.settled: list[tuple[str, int]] = []  # on the way to the head
        self.prompts: list[SimPrompt] = []
        self.by_ref: dict[RequestRef, SimPrompt] = {}
        self.by_ticket: dict[str, SimPrompt] = {}
        self.by_handle: dict[int, SimPrompt] = {}
        self.senders = [SimSender(stage, self.by_handle) for stage in self.pipeline.stages]
        self.fills: list[SimPrompt] = []  # announcements that are unanswered
        self.expected_fails: list[FailedTicket] = []
        self.chunks: list[Step] = []
        self.last_command = self.progress = 0

    # -- what routers and the broker do --

    def submit(
        self,
        num_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        ticket: bool = True,
        group: str = "d",
        family: Family | None = None,
        **standing: Any,
    ) -> SimPrompt:
        """`standing` is priority, waited_s and recompute."""
        number, sampling = len(self.prompts), sampling or SamplingParams(max_tokens=4 if ticket else 1)
        ref, ticket_id = ref_of(number, family), f"t{number}" if ticket else ""
        prompt = SimPrompt(ref, ticket_id, num_tokens, sampling, group)
        prompt.gone = not 0 < num_tokens <= self.scheduler.pages.num_pages * self.page_size
        self.prompts.append(prompt)
        self.by_ref[ref] = self.by_ticket[ticket_id] = prompt  # those without a ticket share the empty id
        tokens = np.array([token_at(ref, position) for position in range(num_tokens)], dtype=np.int64)
        self.scheduler.submit(ref, sampling, tokens, ticket_id, group, **standing)
        self.check()
        return prompt

    def reserved(self, prompt: SimPrompt) -> None:
        prompt.asks -= 1
        pages = tuple(range(100, 100 + pages_for(prompt.num_tokens, self.page_size)))
        if not prompt.over:
            prompt.plan = SendPlan(prompt.ticket_id, prompt.num_tokens, pages, TARGETS)
        self.scheduler.reserved(prompt.ticket_id, pages, TARGETS)
        self.check()

    def no_pages(self, prompt: SimPrompt) -> None:
        prompt.asks -= 1
        self.scheduler.ask_again(prompt.ticket_id)
        self.check()

    def filled(self, prompt: SimPrompt) -> None:
        self.fills.remove(prompt)
        prompt.filled = True
        self.scheduler.filled(prompt.ticket_id)
        self.check()

    def not_filled(self, prompt: SimPrompt) -> None:
        """The decode side has taken its pages back before any write."""
        self.fills.remove(prompt)
        prompt.plan, prompt.announced = None, False
        self.scheduler.ask_again(prompt.ticket_id)
        self.check()

    def ticket_failed(self, prompt: SimPrompt) -> None:
        """The broker says so, in whatever state. The answer is a promise about writes."""
        quiescent = self.scheduler.ticket_failed(prompt.ticket_id, "told to")
        assert quiescent == (not prompt.unsettled)
        prompt.failed = True
        prompt.gone |= not prompt.over
        self.check()

    def abort(self, prompt: SimPrompt) -> None:
        if prompt.ticket_id and (not prompt.over or (prompt.unsettled and not prompt.gone)):
            self.expected_fails.append(FailedTicket(prompt.ticket_id, quiescent=not prompt.unsettled))
        self.scheduler.abort(prompt.ref)
        prompt.gone |= not prompt.over
        prompt.aborted = True
        self.check()

    def flush(self) -> None:
        assert self.scheduler.pages.num_cached == self.scheduler.flush_cache()
        assert not self.scheduler.pages.num_cached
        self.check()

    # -- what the stages do --

    def move(self, rank: int) -> None:
        if (command := self.pipeline.move(rank)) is None:
            return
        self.senders[rank].after(command)

    def write(self, rank: int, handle: int) -> None:
        self.senders[rank].write(handle)

    def settle(self, rank: int, handle: int) -> None:
        self.settled.append((self.senders[rank].settle(handle).ticket_id, rank))

    # -- what the head does --

    def deliver(self) -> None:
        number, ids = self.pipeline.inbox.popleft()
        if ids is None:
            self.scheduler.applied(number)
        else:
            for row, token in zip(self.chunks[number - 1].rows.tolist(), ids, strict=True):
                prompt = self.by_handle[row[HANDLE]]
                assert (token >= 0) == (row[START] + row[COUNT] == prompt.num_tokens)
                prompt.sampled |= token >= 0 and not prompt.gone
            self.scheduler.result(number, np.array(ids, dtype=np.int64))
        self.check()

    def deliver_settled(self, pick: int) -> None:
        ticket_id, rank = self.settled.pop(pick % len(self.settled))
        self.by_ticket[ticket_id].unsettled.remove(rank)
        self.scheduler.settled(ticket_id, rank)
        self.check()

    def poll(self) -> PrefillActions:
        actions = self.scheduler.poll()
        for command in actions.commands:
            self._check_command(command)
            self.pipeline.issue(command)
        for output in actions.outputs:
            self._take(output)
        for ticket_id in actions.reserve:
            self._asked(self.by_ticket[ticket_id])
        for ticket_id in actions.fill:
            self._announced(self.by_ticket[ticket_id])
        assert actions.fail == self.expected_fails
        self.expected_fails = []
        for prompt in self.prompts:
            prompt.silent |= prompt.aborted
        self.progress += bool(actions.commands or actions.reserve or actions.fill)
        self.scheduler.check_integrity()
        return actions

    def crank(self, rounds: int = 1) -> None:
        """Every stage moves, all steps' results are delivered, the head polls."""
        for _ in range(rounds):
            for rank in self.pipeline.movable():
                self.move(rank)
            while self.pipeline.inbox:
                self.deliver()
            self.poll()

    def run_dry(self) -> None:
        """Until nothing is under way that could go on by itself."""
        self.poll()
        while not self.pipeline.quiet:
            assert self.pipeline.inbox or self.pipeline.movable(), "the stages wait for inputs that never come"
            self.crank()

    # -- what must hold --

    def check(self) -> None:
        self.progress += 1
        self.scheduler.check_integrity()

    def _check_command(self, command: Command) -> None:
        self.last_command += 1
        assert command.number == self.last_command
        for handle in command.drops:
            prompt = self.by_handle[handle]
            assert prompt.over
            assert not prompt.dropped
            assert not prompt.unsettled
            assert not self._in_flight(handle)
            prompt.dropped = True
        for handle in command.cancels:
            assert self.by_handle[handle].plan is not None  # settled perhaps by now: the stages take no note then
        for join in command.joins:
            self._check_join(join)
        if command.step is not None:
            self._check_step(command.step)

    def _check_join(self, join: Join) -> None:
        prompt = self.by_ref[join.request]
        assert prompt.handle is None
        assert not prompt.gone
        assert join == Join(join.handle, prompt.ref, prompt.sampling, prompt.plan, prompt.num_tokens)
        assert (join.send is not None) == bool(prompt.ticket_id)
        assert prompt.filled or not prompt.ticket_id
        prompt.handle = join.handle
        prompt.unsettled = set(range(len(self.pipeline.stages))) if join.send else set()
        self.by_handle[join.handle] = prompt
        held = [p for p in self.prompts if p.handle is not None and not p.dropped]
        assert len(held) <= self.max_sequences

    def _check_step(self, step: Step) -> None:
        self.chunks.append(step)
        assert step.number == len(self.chunks)
        assert step.rows.shape == (len(step.rows), ROW_WIDTH)
        assert 0 < step.num_tokens <= self.chunk_size
        assert len(step.tokens) == step.num_tokens
        assert len(set(step.rows[:, HANDLE].tolist())) == len(step.rows)
        assert len(self.scheduler.issuer.outstanding) <= self.max_steps
        for row in step.rows.tolist():
            prompt = self.by_handle[row[HANDLE]]
            assert not prompt.over
            if prompt.cached is None:
                prompt.cached = prompt.issued = row[START]
                assert not prompt.cached % self.page_size
            assert row[START] == prompt.issued
            assert row[COUNT] > 0
            prompt.issued += row[COUNT]
            assert row[FLAGS] == (SAMPLE if prompt.issued == prompt.num_tokens else 0)
            assert (row[SOURCE_STEP], row[SOURCE_ROW]) == (0, 0)

    def _in_flight(self, handle: int) -> int:
        outstanding = self.scheduler.issuer.outstanding.values()
        return sum(handle in step.rows[:, HANDLE].tolist() for step in outstanding)

    def _take(self, output: SequenceOutput) -> None:
        prompt = self.by_ref[output.request]
        assert not prompt.outputs
        assert not prompt.silent
        prompt.outputs.append(output)
        if output.token_ids:
            assert prompt.sampled
            token = token_at(prompt.ref, prompt.num_tokens)
            end = end_after(prompt.sampling, token, 1)
            assert output == SequenceOutput(prompt.ref, (token,), end, cached_tokens=prompt.cached or 0)
        elif output.end is SequenceEnd.FAILED:
            assert (prompt.failed, output.error) == (True, "told to")
        else:
            assert output.end is SequenceEnd.REJECTED
            assert output.error.startswith("prompt: ")

    def _asked(self, prompt: SimPrompt) -> None:
        assert (prompt.over, prompt.asks, prompt.plan) == (False, 0, None)
        prompt.asks += 1

    def _announced(self, prompt: SimPrompt) -> None:
        assert not prompt.over
        assert prompt.plan is not None
        assert not prompt.announced
        prompt.announced = True
        self.fills.append(prompt)

    def check_all_is_back(self) -> None:
        """Nothing is under way any more: nothing is held, and everybody got what they were to get."""
        assert not any(self.scheduler.held.values()), self.scheduler.held
        assert self.scheduler.load.pages_free == self.scheduler.pages.num_pages
        assert not any(sender.outgoing for sender in self.senders)
        self.pipeline.check_empty()
        for prompt in self.prompts:
            assert prompt.gone or (prompt.issued, len(prompt.outputs)) == (prompt.num_tokens, 1)
