"""A decode instance without torch, broker or router: a scheduler, its stages, and remote writers of KV.

Events come one at a time, in whatever order the test likes; everything that must hold is checked after each.
"""

from __future__ import annotations

import time

import numpy as np

from stagemesh.shared.core.commands import Command, unpack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.decode_state import Admission
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from tests.support.decode_checks import CommandChecks, OrderChecks
from tests.support.decode_request import SimRequest
from tests.support.sim_stages import SimPipeline, token_at

AGEING_S = 10.0


class DecodeSim:
    """`requests` by number. A method is one event; it returns when everything that must hold still does."""

    def __init__(
        self,
        *,
        num_stages: int,
        num_pages: int,
        page_size: int = 4,
        max_running: int = 6,
        run_ahead: int = 1,
        extra_depth: int = 0,
        host_pages: int = 1_000,
        conservativeness: float = 1.0,
        yield_s: float = 0.0,
    ) -> None:
        self.page_size, self.max_running = page_size, max_running
        self.num_microbatches, self.run_ahead = num_stages + extra_depth, run_ahead
        self.scheduler = DecodeScheduler(
            num_pages=num_pages,
            page_size=page_size,
            num_microbatches=self.num_microbatches,
            max_running=max_running,
            run_ahead=run_ahead,
            pp_size=num_stages,
            host_pages=host_pages,
            schedule_conservativeness=conservativeness,
            priority_ageing_s=AGEING_S,
            yield_s=yield_s,
        )
        self.pipeline = SimPipeline(num_stages, num_pages, page_size)
        self.requests: list[SimRequest] = []
        self.by_ref: dict[RequestRef, SimRequest] = {}
        self.checks = CommandChecks(
            self.scheduler, self.by_ref, microbatches=self.num_microbatches, most_rows=max_running
        )
        self.most_outstanding = 0
        self.order = OrderChecks(self.scheduler, most_running=max_running, ageing_s=AGEING_S)
        self.progress = 0  # counts whatever happens, but polls that bring nothing

    def set_extra_depth(self, depth: int) -> None:
        """Steps that are out may still be of microbatches that are gone."""
        self.scheduler.settings.set("extra_depth", depth)
        count = len(self.scheduler.microbatches.sizes)
        assert count == len(self.pipeline.stages) + depth
        self.num_microbatches = self.checks.microbatches = max(self.num_microbatches, count)

    # -- what routers, the broker and writers do --

    def new_request(self, prompt_tokens: int, sampling: SamplingParams, priority: int = 0) -> SimRequest:
        number = len(self.requests)
        return self._add(
            SimRequest(RequestRef(f"r{number}", number % 2), f"t{number}", prompt_tokens, sampling, priority)
        )

    def _add(self, request: SimRequest) -> SimRequest:
        self.requests.append(request)
        self.by_ref[request.ref] = request
        return request

    def submit(self, request: SimRequest) -> None:
        request.submitted = True
        request.gone = self.too_large(request)
        self.scheduler.submit(
            request.ref,
            request.sampling,
            request.prompt_tokens,
            request.ticket_id,
            priority=request.priority,
            waited_s=time.monotonic() - request.arrived_s,
            recompute=request.recompute,
        )
        self.check()

    def reserve(self, request: SimRequest) -> None:
        """For the first time, or because an answer was lost, or because the pages were taken back."""
        request.asked = True
        self.scheduler.reserve(request.ticket_id, request.ref)
        self.check()

    def cancel_reserve(self, request: SimRequest) -> None:
        """The asker's deadline has passed."""
        request.asked = False
        self.scheduler.cancel_reserve(request.ticket_id)
        self.check()

    def decide(self, request: SimRequest) -> None:
        """The broker's word about pages that this side wants back."""
        self.progress += 1
        request.in_question = False
        request.verdict = not (request.filling or request.asked or request.failed)
        if request.verdict:
            request.pages = ()

    def tell_verdict(self, request: SimRequest) -> None:
        """The broker's word reaches this side."""
        verdict, request.verdict = request.verdict, None
        (self.scheduler.unreserved if verdict else self.scheduler.keep)(request.ticket_id)
        self.check()

    def lose_verdict(self, request: SimRequest) -> None:
        """It does not: the pages stay where they are."""
        request.verdict = None
        self.scheduler.keep(request.ticket_id)
        self.check()

    def fill(self, request: SimRequest) -> None:
        self.progress += 1
        request.filling = True
        num_stages = len(self.pipeline.stages)
        request.to_write = [(rank, index) for index in range(len(request.pages)) for rank in range(num_stages)]

    def write(self, request: SimRequest, pick: int) -> None:
        rank, index = request.to_write.pop(pick % len(request.to_write))
        first = index * self.page_size
        last = min(first + self.page_size, request.prompt_tokens)
        self.pipeline.stages[rank].write_from_elsewhere(request.pages[index], request.ref, first, last)

    def commit(self, request: SimRequest) -> None:
        assert not request.to_write
        request.committed = True
        accepted = self.scheduler.commit(request.ticket_id)
        assert accepted == (not request.aborted)
        self.check()

    def close_ticket(self, request: SimRequest, *, quiesced: bool) -> None:
        request.failed = True
        request.gone |= request.submitted and not request.committed
        if quiesced:
            request.closed = True
            request.to_write = []
        self.scheduler.close_ticket(request.ticket_id, quiesced=quiesced, reason="told to")
        self.check()

    def give_first_token(self, request: SimRequest) -> None:
        request.first_token = True
        self.scheduler.first_token(request.ref, token_at(request.ref, request.prompt_tokens))
        self.check()

    def abort(self, request: SimRequest) -> None:
        to_fail = self.scheduler.abort(request.ref)
        assert to_fail == (None if request.gone or request.committed else request.ticket_id)
        request.aborted = request.gone = True
        self.check()

    def too_large(self, request: SimRequest) -> bool:
        tokens = request.prompt_tokens + request.sampling.max_tokens - 1
        return pages_for(tokens, self.page_size) > self.scheduler.pages.num_pages

    # -- what the stages and the head do --

    def move(self, rank: int) -> None:
        self.pipeline.move(rank)

    def finish_copy(self, rank: int, pick: int = 0) -> None:
        self.pipeline.finish_copy(rank, pick)

    def deliver(self) -> None:
        """The head takes the next thing that has come round the ring."""
        number, ids = self.pipeline.inbox.popleft()
        if ids is None:
            self.scheduler.applied(number)
        else:
            self.pipeline.sampled[number] = ids
            self.scheduler.result(number, np.array(ids, dtype=np.int64))
            oldest = self.scheduler.oldest_source
            self.pipeline.sampled = {step: ids for step, ids in self.pipeline.sampled.items() if step >= oldest}
        self.check()

    def deliver_copied(self, pick: int = 0) -> None:
        """A stage's word that it has copied; these come in any order."""
        self.pipeline.copied.rotate(-(pick % len(self.pipeline.copied)))
        handle, rank, restored = self.pipeline.copied.popleft()
        self.checks.copies[handle].remove(rank)
        self.scheduler.copied(handle, rank, restored=restored)
        self.check()

    def poll(self) -> None:
        self.order.before_poll()
        actions = self.scheduler.poll()
        for command in actions.commands:
            self.checks.check(command, len(self.pipeline.stages))
            self.pipeline.issue(command)
        self.most_outstanding = max(self.most_outstanding, len(self.scheduler.issuer.outstanding))
        assert self.most_outstanding <= self.num_microbatches + self.run_ahead
        for output in actions.outputs:
            self._take(output)
        for admission in actions.admissions:
            self._admit(admission)
        for ticket_id in actions.cancelled:
            self._question(ticket_id)
        for request in self.requests:
            request.silent |= request.aborted
        self.progress += bool(actions.commands or actions.admissions or actions.cancelled)
        self.scheduler.check_integrity()
        self.order.check({admission.ticket_id for admission in actions.admissions})

    def crank(self, rounds: int = 1) -> None:
        """Every stage moves and copies, everything is delivered, the head polls."""
        for _ in range(rounds):
            for rank in self.pipeline.movable():
                self.move(rank)
            for rank in self.pipeline.copying():
                self.finish_copy(rank)
            while self.pipeline.inbox:
                self.deliver()
            while self.pipeline.copied:
                self.deliver_copied()
            self.poll()

    def run_dry(self) -> None:
        """Until nothing is under way that could go on by itself. There is an end to it: the oldest that runs goes on
        whatever happens, and of those that are retracted the oldest comes first."""
        self.poll()
        rounds = sum(10 * request.sampling.max_tokens + 50 for request in self.requests)
        while not self.pipeline.quiet:
            rounds -= 1
            assert rounds, "no end to it"
            busy = self.pipeline.inbox or self.pipeline.movable() or self.pipeline.copying() or self.pipeline.copied
            assert busy, "the stages wait for inputs that never come"
            self.crank()

    # -- what must hold --

    def check(self) -> None:
        self.progress += 1
        self.scheduler.check_integrity()

    def _take(self, output: SequenceOutput) -> None:
        request = self.by_ref[output.request]
        assert request.end is None
        assert not request.silent
        request.end = output.end
        if output.end is SequenceEnd.REJECTED:
            assert self.too_large(request)
            assert output.error.startswith("max_tokens: ")
            return
        if output.end is SequenceEnd.FAILED:
            assert (output.error, output.token_ids) == ("told to", ())
            assert request.failed
            assert not request.tokens
            return
        if output.end is SequenceEnd.RECOMPUTE:
            assert not output.token_ids
            if (again := request.continuation(f"t{len(self.requests)}")) is not None:
                self._add(again)
            return
        request.tokens += output.token_ids
        expected, end = request.expected
        assert request.tokens == expected[1 : len(request.tokens) + 1]
        assert output.end is (end if len(request.tokens) + 1 == len(expected) else None)

    def _admit(self, admission: Admission) -> None:
        request = next(request for request in self.requests if request.ticket_id == admission.ticket_id)
        assert request.asked
        assert not request.gone
        assert request.pages in ((), admission.pages)
        assert len(admission.pages) == pages_for(request.prompt_tokens, self.page_size)
        request.asked, request.pages = False, admission.pages
        leased = set(admission.pages)
        for stage, queue in zip(self.pipeline.stages, self.pipeline.queues, strict=True):
            assert not stage.owner.keys() & leased, "leased before every stage has dropped it"
            commands = [item for item in queue if isinstance(item, Command)]
            coming = [page for command in commands for _, pages in unpack_deltas(command.page_deltas) for page in pages]
            assert not leased & set(coming), "leased, but on its way to a sequence"
        others = {page for other in self.requests if other.writable and other is not request for page in other.pages}
        assert not leased & others, "leased while another ticket's writer may write to it"

    def _question(self, ticket_id: str) -> None:
        request = next(request for request in self.requests if request.ticket_id == ticket_id)
        assert request.pages
        assert not request.committed
        assert not request.in_question
        assert request.verdict is None
        request.in_question = True

    def check_all_is_back(self) -> None:
        """Nothing is under way any more: nothing is held, and everybody got what they were to get."""
        assert not any(self.scheduler.held.values()), self.scheduler.held
        assert self.scheduler.load.pages_free == self.scheduler.pages.num_pages
        self.pipeline.check_empty()
        for request in self.requests:
            self._check_outcome(request)

    def _check_outcome(self, request: SimRequest) -> None:
        expected, end = request.expected
        rows, needed = self.pipeline.rows_run.get(request.ref, 0), len(expected) - 1
        assert rows <= needed + (end is SequenceEnd.STOP and needed > 0)
        if request.end is SequenceEnd.RECOMPUTE:
            return
        if request.submitted and not request.gone and needed:
            assert (request.tokens, request.end) == (expected[1:], end)
            assert rows >= needed
        if request.end in (SequenceEnd.STOP, SequenceEnd.LENGTH):
            assert (request.tokens, request.end) == (expected[1:], end)
        if request.end is SequenceEnd.REJECTED:
            assert not rows
