"""The head of a decode instance: its scheduler, and what follows from the scheduler's decisions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.codec.commands import sampling_from_pb
from stagemesh.shared.codec.mesh import request_from_pb
from stagemesh.shared.core.commands import Ints, RowLogprobs
from stagemesh.shared.core.directory import InstanceLoad
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import MAX_TOKENS
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.describe import describe_decode
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.waiting import waiting
from stagemesh.shared.errors import Cancelled, ProtocolViolation, StagemeshError
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.metrics import Sample
from stagemesh.shared.pb import instance_pb2, stage_pb2
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.stage.head import Head, HeadContext
from stagemesh.shared.stage.measure import measure_ages, measure_pressure, measure_scheduling, measure_waiting


class DecodeHead(Head):
    """Answers the broker's reservations when there are pages; joins what is committed; streams tokens a step at a
    time. When pages run out it asks the broker which reservations nobody uses yet."""

    def __init__(self, context: HeadContext, scheduler: DecodeScheduler) -> None:
        super().__init__(context)
        self._scheduler = scheduler
        self._again: asyncio.TimerHandle | None = None
        self._again_s = 0.0
        self._reserving: dict[str, asyncio.Future[tuple[int, ...]]] = {}
        self._num_corrupt = 0  # pieces of KV

    # -- events --

    def on_result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None:
        self._context.tracer.mark("result", step=step)
        self._check_ids(self._scheduler.issuer.outstanding.get(step), token_ids)
        self._context.executor.sampled(step, token_ids)
        self._scheduler.launched(self._context.executor.launch_s)
        self._scheduler.result(step, token_ids, logprobs)
        self._context.executor.forget_sampled_before(self._scheduler.oldest_source)
        self.wake()

    def on_applied(self, number: int) -> None:
        self._scheduler.applied(number)
        self.wake()

    def on_settled(self, settled: stage_pb2.Settled) -> None:
        raise ProtocolViolation("a decode stage has nothing to settle")

    def on_copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        self._context.tracer.mark("copied", handle=handle, pp_rank=pp_rank, restored=restored)
        self._scheduler.copied(handle, pp_rank, restored=restored)
        self.wake()

    def on_submit(self, submit: instance_pb2.SessionUp.Submit) -> None:
        if not (math.isfinite(submit.waited_s) and submit.waited_s >= 0):
            raise ProtocolViolation(f"a request has waited for 0 s or more, not {submit.waited_s}")
        request, sampling = request_from_pb(submit.request), sampling_from_pb(submit.sampling)
        error = sampling.flaw(self._context.vocab_size) or self._scheduler.conflict(submit.ticket_id)
        if error is None and not 1 <= submit.prompt_tokens <= MAX_TOKENS:
            error = f"prompt_tokens: must be 1..{MAX_TOKENS}, got {submit.prompt_tokens}"
        if error is not None:
            self._sessions.deliver([SequenceOutput(request, end=SequenceEnd.REJECTED, error=error)])
            return
        self._scheduler.submit(
            request,
            sampling,
            submit.prompt_tokens,
            submit.ticket_id,
            priority=submit.priority,
            waited_s=submit.waited_s,
            recompute=submit.recompute,
            peer=InstanceRef(submit.peer_instance, submit.peer_epoch),
        )
        self.wake()

    def on_first_token(self, request: RequestRef, token_id: int) -> None:
        if not 0 <= token_id < self._context.vocab_size:
            raise ProtocolViolation(f"a first token must be in 0..{self._context.vocab_size - 1}, got {token_id}")
        self._scheduler.first_token(request, token_id)
        self._context.tracer.mark("first_token", request=str(request))
        self.wake()

    def on_abort(self, request: RequestRef) -> None:
        if (ticket_id := self._scheduler.abort(request)) is not None:
            self._context.spawn(self._fail(ticket_id))
        self.wake()

    def adjust(self, setting: str, value: float) -> float:
        previous = self._scheduler.settings.set(setting, value)
        self._context.log.info("a setting is changed", setting=setting, value=value, previous=previous)
        self.wake()
        return previous

    # -- the broker's calls --

    async def ReservePages(  # noqa: N802
        self, request: instance_pb2.ReservePagesRequest, context: Any
    ) -> instance_pb2.ReservePagesReply:
        """Waits until there are pages. Asked again for the same ticket, it gives the same pages, unless they have been
        taken back."""
        self._check_epoch(request.epoch)
        pages = await self._reserve(request.ticket_id, request_from_pb(request.request))
        return instance_pb2.ReservePagesReply(pages=to_bytes(pages))

    async def _reserve(self, ticket_id: str, request: RequestRef) -> tuple[int, ...]:
        answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        before = self._reserving.get(ticket_id)
        if before is not None and not before.done():
            before.set_exception(Cancelled(f"ticket {ticket_id}: it is asked for again"))  # by a broker started anew
        self._reserving[ticket_id] = answer
        self._scheduler.reserve(ticket_id, request)
        self.wake()
        try:
            return await answer
        finally:
            if self._reserving.get(ticket_id) is answer:
                del self._reserving[ticket_id]
                self._scheduler.cancel_reserve(ticket_id)
                self.wake()

    async def VerifyPages(  # noqa: N802
        self, request: instance_pb2.VerifyPagesRequest, context: Any
    ) -> instance_pb2.VerifyPagesReply:
        """Asked again, it looks again. Pages that are the ticket's no more when all have looked may be another's by
        now, with other KV: then nothing is known."""
        self._check_epoch(request.epoch)
        pages = self._scheduler.reserved_pages(request.ticket_id)
        no_pages = instance_pb2.VerifyPagesReply(error=f"ticket {request.ticket_id} has no pages here")
        if not pages:
            return no_pages
        checks = list(request.checks)
        for check in checks:
            check.pages = to_bytes(pages[check.first_page : check.first_page + len(check.crcs)])
        put = lambda number: self._context.ask_verify(stage_pb2.Verify(number=number, checks=checks))  # noqa: E731
        said = await self._questions.ask(len(self._context.info.stages), put)
        if self._scheduler.reserved_pages(request.ticket_id) != pages:
            return no_pages
        if said.error:
            self._num_corrupt += said.num_wrong
            self._context.log.error("KV is corrupt", ticket_id=request.ticket_id, reason=said.error)
        return instance_pb2.VerifyPagesReply(error=said.error)

    async def CommitTicket(  # noqa: N802
        self, request: instance_pb2.CommitTicketRequest, context: Any
    ) -> instance_pb2.CommitTicketReply:
        self._check_epoch(request.epoch)
        accepted = self._scheduler.commit(request.ticket_id)
        self._context.tracer.mark("committed", ticket=request.ticket_id)
        self.wake()
        return instance_pb2.CommitTicketReply(accepted=accepted)

    async def CloseTicket(  # noqa: N802
        self, request: instance_pb2.CloseTicketRequest, context: Any
    ) -> instance_pb2.CloseTicketReply:
        self._check_epoch(request.epoch)
        answer = self._reserving.get(request.ticket_id)
        if answer is not None and not answer.done():
            answer.set_exception(Cancelled(f"ticket {request.ticket_id}: {request.reason}"))
        end = SequenceEnd.LOST if request.lost else SequenceEnd.FAILED
        self._scheduler.close_ticket(request.ticket_id, quiesced=request.quiesced, reason=request.reason, end=end)
        self.wake()
        return instance_pb2.CloseTicketReply()

    def _legs(self) -> list[TicketLeg]:
        return list(self._scheduler.legs())

    # -- the pump --

    def pump(self) -> None:
        actions = self._scheduler.poll()
        self._issue(actions.commands)
        for first in actions.first_steps:
            self._context.tracer.mark("first_step", step=first.step, ticket=first.ticket_id, request=str(first.request))
        self._sessions.deliver(actions.outputs)
        for admission in actions.admissions:
            answer = self._reserving.get(admission.ticket_id)
            if answer is not None and not answer.done():
                answer.set_result(admission.pages)
        for ticket_id in actions.cancelled:
            self._context.spawn(self._take_back(ticket_id))
        if actions.again_s is not None:
            self._look_again(actions.again_s)

    def _look_again(self, at_s: float) -> None:
        """At the earliest time that has been asked for. A timer may be early by its own grain, and asks anew then."""
        if self._again is not None and self._again_s <= at_s:
            return
        if self._again is not None:
            self._again.cancel()
        self._again_s = at_s
        self._again = asyncio.get_running_loop().call_later(at_s - time.monotonic(), self._poll_again)

    def _poll_again(self) -> None:
        self._again = None
        self.wake()

    async def _take_back(self, ticket_id: str) -> None:
        """Asks the broker for the pages of a ticket. Without an answer they stay where they are: if the broker has
        taken the reservation back all the same, they are what the ticket gets when it asks again. So it is with the
        answer of a broker that has been asked before this instance joined the one that there is now."""
        joins = self._joins
        try:
            unused = await self._context.broker.unreserve(ticket_id) and joins == self._joins
        except StagemeshError as error:
            self._context.log.warning("nobody says whether pages are in use", ticket_id=ticket_id, error=str(error))
            unused = False
        (self._scheduler.unreserved if unused else self._scheduler.keep)(ticket_id)
        self.wake()

    async def _fail(self, ticket_id: str) -> None:
        try:
            await retry(lambda: self._context.broker.fail_ticket(ticket_id, "aborted"))
        except StagemeshError as error:
            self._context.log.warning("the broker knows no such ticket", ticket_id=ticket_id, error=str(error))

    # -- views --

    @property
    def load(self) -> InstanceLoad:
        return self._scheduler.load

    @property
    def held(self) -> Mapping[str, int]:
        return {**self._scheduler.held, "requests": self._sessions.num_requests}

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def measure(self) -> Iterator[Sample]:
        scheduler, stats = self._scheduler, self._scheduler.stats
        yield from measure_scheduling(scheduler.pages, scheduler.issuer, scheduler.by_state)
        now_s = time.monotonic()
        yield from measure_ages(scheduler.sequences, now_s)
        yield from measure_waiting(waiting(scheduler, now_s))
        yield from measure_pressure(stats, scheduler.host_pages, scheduler.host_pages_used)
        yield Sample(metrics.SESSIONS, self._sessions.num_open)
        yield Sample(metrics.MICROBATCHES, len({step.microbatch for step in scheduler.issuer.outstanding.values()}))
        yield Sample(metrics.RESERVE_WAIT, stats.reserve_wait.snapshot())
        yield Sample(metrics.FIRST_STEP_WAIT, stats.first_step_wait.snapshot())
        yield Sample(metrics.STEP_ROWS, stats.step_rows.snapshot())
        yield Sample(metrics.DECODED_TOKENS, stats.decoded_tokens)
        yield Sample(metrics.WASTED_ROWS, stats.wasted_rows)
        yield Sample(metrics.KV_CORRUPT, self._num_corrupt)

    def describe(self, now_s: float) -> Iterable[Entry]:
        info = self._context.info
        return describe_decode(self._scheduler, info.ref.name, now_s)
