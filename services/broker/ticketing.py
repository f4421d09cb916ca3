"""What routers, heads and stages ask of the broker about tickets."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from stagemesh.services.broker.follow_up import FollowUp
from stagemesh.services.broker.members import Members
from stagemesh.services.broker.recovery import Recovery
from stagemesh.services.broker.ticket import PieceSpan, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.codec.mesh import ref_from_pb, stage_to_pb
from stagemesh.shared.core.directory import Role, mismatch
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.stats import waits
from stagemesh.shared.errors import Cancelled, ProtocolViolation, Rejected
from stagemesh.shared.fsm.ticket import TicketState
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.broker import RESERVE_TIMEOUT_S


class Ticketing:
    """`broker` says which start of the broker this is. `on_used` hears of each instance that is to write."""

    def __init__(
        self,
        broker: str,
        tickets: TicketBook,
        members: Members,
        recovery: Recovery,
        follow_up: FollowUp,
        tracer: Tracer,
        on_used: Callable[[str], None],
    ) -> None:
        self._broker, self._tickets, self._members = broker, tickets, members
        self._recovery, self._follow_up, self._tracer, self._on_used = recovery, follow_up, tracer, on_used
        self.reserving: dict[str, float] = {}  # ticket -> since when its pages are being asked for
        self._asked: dict[str, int] = {}  # ticket -> which call asks for them
        self._calls = count(1)
        self.reserve_wait = waits()

    async def open_ticket(self, request: broker_pb2.OpenTicketRequest) -> broker_pb2.OpenTicketReply:
        pair = ref_from_pb(request.prefill), ref_from_pb(request.decode)
        await self._recovery.until_here(*pair)
        prefill = self._members.of_role(pair[0], Role.PREFILL)
        decode = self._members.of_role(pair[1], Role.DECODE)
        if (difference := mismatch(prefill.manifest, decode.manifest)) is not None:
            raise Rejected("manifest", f"{prefill.ref} and {decode.ref} do not fit: {difference}")
        limit = decode.manifest.num_pages * decode.manifest.page_size
        if not 1 <= request.prompt_tokens <= limit:
            raise Rejected("prompt_tokens", f"must be 1..{limit} ({decode.ref}'s pages), got {request.prompt_tokens}")
        self._on_used(prefill.ref.name)
        ref = RequestRef(request.request_id, request.attempt)
        ticket = self._tickets.open(ref, prefill, decode, request.prompt_tokens, request.max_tokens, request.router)
        return broker_pb2.OpenTicketReply(ticket_id=ticket.ticket_id)

    async def reserve(
        self, request: broker_pb2.ReserveRequest, time_remaining: Callable[[], float | None]
    ) -> broker_pb2.ReserveReply:
        """`time_remaining` until the caller's deadline, in seconds, if it has one."""
        ticket = await self._recovery.ticket(request.ticket_id)
        remaining_s = time_remaining()
        since_s = self.reserving[ticket.ticket_id] = time.monotonic()
        call = self._asked[ticket.ticket_id] = next(self._calls)
        try:
            pages = await self._members.heads.reserve(ticket, RESERVE_TIMEOUT_S if remaining_s is None else remaining_s)
        finally:
            if is_latest := self._asked.get(ticket.ticket_id) == call:
                del self.reserving[ticket.ticket_id], self._asked[ticket.ticket_id]
        if not is_latest:  # what this one was told may have been taken back since
            raise Cancelled(f"ticket {ticket.ticket_id}: its pages have been asked for again")
        self.reserve_wait.record(time.monotonic() - since_s)
        if ticket.state not in (TicketState.OPENED, TicketState.RESERVED):
            raise Cancelled(f"ticket {ticket.ticket_id} is closed: {ticket.reason}")
        self._tickets.reserved(ticket)
        decode = self._members.get(ticket.decode)
        if decode is None:
            raise Cancelled(f"ticket {ticket.ticket_id}: {ticket.decode} is lost")
        return broker_pb2.ReserveReply(pages=to_bytes(pages), targets=[stage_to_pb(s) for s in decode.stages])

    async def fill(self, request: broker_pb2.FillRequest) -> broker_pb2.FillReply:
        filling = self._tickets.fill(await self._recovery.ticket(request.ticket_id))
        return broker_pb2.FillReply(taken_back=not filling)

    async def unreserve(self, request: broker_pb2.UnreserveRequest) -> broker_pb2.UnreserveReply:
        """Refused while the pages are being asked for: an answer that names them may be on its way."""
        if request.ticket_id in self.reserving:
            return broker_pb2.UnreserveReply(accepted=False)
        try:
            ticket = self._tickets.get(request.ticket_id)
        except Cancelled:  # the decode head hears of it by another call
            return broker_pb2.UnreserveReply(accepted=False)
        return broker_pb2.UnreserveReply(accepted=self._tickets.unreserve(ticket))

    async def report_writer(self, request: broker_pb2.WriterReport) -> broker_pb2.WriterReportReply:
        try:
            ticket = await self._recovery.ticket(request.ticket_id)
        except Cancelled:  # it is over: nobody wants to know
            return broker_pb2.WriterReportReply(broker=self._broker)
        if ref_from_pb(request.instance) != ticket.prefill:
            raise ProtocolViolation(f"ticket {ticket.ticket_id} is not written by {ref_from_pb(request.instance)}")
        self._tracer.mark("report", ticket=ticket.ticket_id, pp_rank=request.pp_rank)
        spans = [PieceSpan(p.target_rank, p.first_page, p.last_page, tuple(p.crcs)) for p in request.pieces]
        outcome = WriterOutcome(tuple(spans), request.error, request.in_doubt)
        self._follow_up.carry_out(self._tickets.report(ticket, request.pp_rank, outcome))
        # until then the writer's head remembers the ticket: another broker may have to ask
        await self._follow_up.committed(ticket.ticket_id)
        return broker_pb2.WriterReportReply(broker=self._broker)

    async def fail_ticket(self, request: broker_pb2.FailTicketRequest) -> broker_pb2.FailTicketReply:
        try:
            ticket = await self._recovery.ticket(request.ticket_id)
        except Cancelled:
            return broker_pb2.FailTicketReply()
        self._follow_up.carry_out(self._tickets.fail(ticket, request.reason, quiescent=request.quiescent))
        return broker_pb2.FailTicketReply()
