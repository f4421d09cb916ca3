"""The head of a prefill instance: its scheduler, and what follows from the scheduler's decisions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stagemesh.services.prefill.reports import NONE, Reports
from stagemesh.shared.codec.arrays import to_array
from stagemesh.shared.codec.commands import sampling_from_pb
from stagemesh.shared.codec.mesh import request_from_pb
from stagemesh.shared.core.commands import Ints, RowLogprobs
from stagemesh.shared.core.directory import InstanceLoad
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.engine.schedule.describe import describe_prefill
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.engine.schedule.prefill_state import FailedTicket
from stagemesh.shared.errors import Cancelled, ProtocolViolation, Retryable, StagemeshError
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.metrics import Sample, by_label
from stagemesh.shared.pb import broker_pb2, instance_pb2, stage_pb2
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.stage.head import Head, HeadContext
from stagemesh.shared.stage.measure import measure_ages, measure_scheduling


class PrefillHead(Head):
    """Asks for pages just before a prompt starts; streams first tokens; frees pages when their KV has been sent."""

    def __init__(self, context: HeadContext, scheduler: PrefillScheduler) -> None:
        super().__init__(context)
        self._scheduler = scheduler
        self._reports = Reports()
        self._broker = ""  # which start of it this instance has joined

    # -- events --

    def on_result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None:
        self._context.tracer.mark("result", step=step)
        self._check_ids(self._scheduler.issuer.outstanding.get(step), token_ids)
        self._scheduler.result(step, token_ids, logprobs)
        self.wake()

    def on_applied(self, number: int) -> None:
        self._scheduler.applied(number)
        self.wake()

    def on_settled(self, settled: stage_pb2.Settled) -> None:
        report = settled.report
        self._reports.add(report, settled.broker)
        self._scheduler.settled(report.ticket_id, report.pp_rank)
        if settled.broker not in ("", self._broker):
            self._context.spawn(self._repeat(report))
        self._forget_reports()
        self.wake()

    def on_copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        raise ProtocolViolation("a prefill stage has nothing to copy")

    def on_submit(self, submit: instance_pb2.SessionUp.Submit) -> None:
        request, sampling = request_from_pb(submit.request), sampling_from_pb(submit.sampling)
        tokens = to_array(submit.token_ids)
        if (error := sampling.flaw(self._context.vocab_size) or self._scheduler.conflict(submit.ticket_id)) is not None:
            self._sessions.deliver([SequenceOutput(request, end=SequenceEnd.REJECTED, error=error)])
            return
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._context.vocab_size:
            error = f"token_ids: must be in 0..{self._context.vocab_size - 1}"
            self._sessions.deliver([SequenceOutput(request, end=SequenceEnd.REJECTED, error=error)])
            return
        if not (math.isfinite(submit.waited_s) and submit.waited_s >= 0):
            error = f"waited_s: must be 0 or more, got {submit.waited_s}"
            self._sessions.deliver([SequenceOutput(request, end=SequenceEnd.REJECTED, error=error)])
            return
        self._scheduler.submit(
            request,
            sampling,
            tokens,
            submit.ticket_id,
            submit.peer_instance,
            priority=submit.priority,
            waited_s=submit.waited_s,
            recompute=submit.recompute,
            peer=InstanceRef(submit.peer_instance, submit.peer_epoch),
        )
        self.wake()

    def on_first_token(self, request: RequestRef, token_id: int) -> None:
        raise ProtocolViolation("a prefill instance makes first tokens, it takes none")

    def on_abort(self, request: RequestRef) -> None:
        self._scheduler.abort(request)
        self.wake()

    def flush_cache(self) -> int:
        """Forgets the KV of finished prompts that nobody shares now. Returns how many pages that makes free."""
        num_pages = self._scheduler.flush_cache()
        self._context.log.info("the prefix cache has been flushed", pages=num_pages)
        return num_pages

    # -- the broker's calls --

    async def ReservePages(  # noqa: N802
        self, request: instance_pb2.ReservePagesRequest, context: Any
    ) -> instance_pb2.ReservePagesReply:
        raise ProtocolViolation("a prefill instance has no pages to reserve")

    async def CommitTicket(  # noqa: N802
        self, request: instance_pb2.CommitTicketRequest, context: Any
    ) -> instance_pb2.CommitTicketReply:
        raise ProtocolViolation("a prefill instance takes no KV")

    async def CloseTicket(  # noqa: N802
        self, request: instance_pb2.CloseTicketRequest, context: Any
    ) -> instance_pb2.CloseTicketReply:
        self._check_epoch(request.epoch)
        end = SequenceEnd.LOST if request.lost else SequenceEnd.FAILED
        quiescent = self._scheduler.ticket_failed(request.ticket_id, request.reason, end)
        quiescent &= not self._reports.doubtful(request.ticket_id)
        self.wake()
        return instance_pb2.CloseTicketReply(quiescent=quiescent)

    def _legs(self) -> list[TicketLeg]:
        doubtful = self._reports.all_doubtful()
        legs = [replace(leg, doubtful_writers=doubtful.pop(leg.ticket_id, NONE)) for leg in self._scheduler.legs()]
        nobody = InstanceRef("", 0)
        for ticket_id, ranks in doubtful.items():  # all else that is known of them is the decode side's
            request = RequestRef("", 0)
            legs.append(TicketLeg(ticket_id, request, nobody, 0, 0, LegState.ENDING, doubtful_writers=ranks))
        return legs

    def on_joined(self, broker: str) -> None:
        """What stages have told a broker before this one is told again: it may not have heard it."""
        self._broker = broker
        for report in self._reports.unheard(broker):
            self._context.spawn(self._repeat(report))
        self._forget_reports()
        self.wake()

    def _forget_reports(self) -> None:
        self._reports.forget(self._broker, lambda ticket_id: not self._scheduler.knows(ticket_id))

    async def _repeat(self, report: broker_pb2.WriterReport) -> None:
        broker = ""
        try:
            broker = await retry(lambda: self._context.broker.report_writer(report))
        except StagemeshError as error:
            self._context.log.warning("a report was refused", ticket_id=report.ticket_id, error=str(error))
        self._reports.heard(report, broker)
        self._forget_reports()
        self.wake()

    # -- the pump --

    def pump(self) -> None:
        actions = self._scheduler.poll()
        self._issue(actions.commands)
        self._sessions.deliver(actions.outputs)
        for request in actions.through:  # its decode may take as long as it likes: that is no work of this instance
            if not self._scheduler.has(request):  # its router may have let go of it, and sent it anew
                self._sessions.forget(request)
        for ticket_id in actions.reserve:
            self._context.spawn(self._reserve(ticket_id))
        for ticket_id in actions.fill:
            self._context.spawn(self._fill(ticket_id))
        for failed in actions.fail:
            self._context.spawn(self._fail(failed))

    async def _reserve(self, ticket_id: str) -> None:
        try:
            reservation = await self._context.broker.reserve(ticket_id)
        except Retryable:
            self._scheduler.ask_again(ticket_id)
        except StagemeshError as error:
            self._scheduler.ticket_failed(ticket_id, str(error), _end_for(error))
        else:
            self._scheduler.reserved(ticket_id, reservation.pages, reservation.targets)
        self.wake()

    async def _fill(self, ticket_id: str) -> None:
        try:
            granted = await self._fill_granted(ticket_id)
        except StagemeshError as error:
            self._scheduler.ticket_failed(ticket_id, str(error), _end_for(error))
        else:
            (self._scheduler.filled if granted else self._scheduler.ask_again)(ticket_id)
        self.wake()

    async def _fill_granted(self, ticket_id: str) -> bool:
        """The word of a broker that was asked before this instance joined the one that there is now counts no more."""
        while True:
            joins = self._joins
            granted = await retry(lambda: self._context.broker.fill(ticket_id))
            if joins == self._joins:
                return granted

    async def _fail(self, failed: FailedTicket) -> None:
        broker = self._context.broker
        try:
            await retry(lambda: broker.fail_ticket(failed.ticket_id, "aborted", quiescent=failed.quiescent))
        except StagemeshError as error:
            self._context.log.warning("the broker knows no such ticket", ticket_id=failed.ticket_id, error=str(error))

    # -- views --

    @property
    def load(self) -> InstanceLoad:
        return self._scheduler.load

    @property
    def held(self) -> Mapping[str, int]:
        """Once its KV is all there, a request is no concern of this instance; that the broker knows of it, is."""
        unheard = len(self._reports.unheard(self._broker))
        return {**self._scheduler.held, "requests": self._sessions.num_requests, "reports": unheard}

    @property
    def gauges(self) -> Mapping[str, int]:
        return {"pages_cached": self._scheduler.pages.num_cached}

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def measure(self) -> Iterator[Sample]:
        scheduler, stats = self._scheduler, self._scheduler.stats
        yield from measure_scheduling(scheduler.pages, scheduler.issuer, scheduler.by_state)
        yield Sample(metrics.SESSIONS, self._sessions.num_open)
        yield Sample(metrics.RESERVE_WAIT, stats.reserve_wait.snapshot())
        yield Sample(metrics.PREFILL_SECONDS, stats.prefill.snapshot())
        yield Sample(metrics.CHUNK_TOKENS, stats.chunk_tokens.snapshot())
        computed = stats.prompt_tokens - stats.cached_tokens
        yield from by_label(metrics.PREFILL_TOKENS, {"cached": stats.cached_tokens, "computed": computed})
        yield Sample(metrics.EVICTED_PAGES, scheduler.evicted_pages)
        yield from measure_ages(scheduler.sequences, time.monotonic())

    def describe(self, now_s: float) -> Iterable[Entry]:
        return describe_prefill(self._scheduler, self._context.info.ref.name, now_s)


def _end_for(error: StagemeshError) -> SequenceEnd:
    """A ticket that the broker has closed, or has never heard of since it was started again, is nobody's fault."""
    return SequenceEnd.LOST if isinstance(error, Cancelled) else SequenceEnd.FAILED
