"""The broker as a process: the directory and the tickets behind gRPC."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from stagemesh.services.broker.admin import SELF, Admin
from stagemesh.services.broker.describe import describe_ticket, failure_details
from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.members import REAPED, Members
from stagemesh.services.broker.proofs import Proofs
from stagemesh.services.broker.recovery import Recovery
from stagemesh.services.broker.renewing import Renewing
from stagemesh.services.broker.routers import Routers
from stagemesh.services.broker.serving import BusLife
from stagemesh.services.broker.tickets import (
    ABORTED,
    Action,
    Close,
    Commit,
    PieceSpan,
    Ticket,
    TicketBook,
    Verify,
    WriterOutcome,
)
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.codec.mesh import ref_from_pb, stage_to_pb
from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import listen_address
from stagemesh.shared.core.directory import InstanceInfo, Role, mismatch
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.engine.schedule.stats import waits
from stagemesh.shared.errors import Bug, Cancelled, PeerLost, ProtocolViolation, Rejected, StagemeshError
from stagemesh.shared.fsm.ticket import TicketState
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log, choose_form, configure
from stagemesh.shared.obs.metrics import Identity, Sample, by_label
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.access import mesh_access
from stagemesh.shared.rpc.broker import BROKER, RESERVE_TIMEOUT_S
from stagemesh.shared.rpc.inspect import INSPECT, InspectService
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.runtime.loop import LagSampler
from stagemesh.shared.runtime.monitor import Monitor
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import Child, run_to_end
from stagemesh.shared.runtime.tasks import Tasks


class BrokerService:
    """A `Service`, and the Broker service of the wire."""

    QUICK: ClassVar = frozenset({"Fill", "ReportWriter"})

    def __init__(self, config: Config, notifier: Notifier, log: Log) -> None:
        self._config, self._notifier, self._log = config, notifier, log
        self._tracer, self._lag, self._tasks = Tracer("broker"), LagSampler(), Tasks()
        self._access = mesh_access(config.tls, log)
        certificates = {"mesh": self._access.material}
        self._monitor = Monitor(config.metrics, Identity("broker"), self, self._lag, certificates)
        self._fences = Fences()
        self._name = secrets.token_hex(4)  # of this start
        self._tickets, self._routers = TicketBook(self._name), Routers()
        self._events = Events(config.mesh.name, self._name)
        self._members = Members(
            self._name,
            self._tasks,
            log,
            self._fences,
            on_joined=self._joined,
            on_lost=self._lost,
            on_router_gone=self._router_gone,
            events=self._events,
            dial=self._access.dial,
            rejoin_s=config.broker.rejoin_s,
        )
        self._recovery = Recovery(
            self._tickets,
            {instance.name: instance.pp_size for instance in config.instances},
            bound_s=config.broker.rejoin_s,
            find=self._members.get,
            carry_out=self._carry_out,
            on_over=self._gathered,
            log=log,
        )
        self._committing: dict[str, asyncio.Event] = {}
        self._proofs = Proofs(
            self._tickets,
            self._fences,
            read_out=lambda ref: self._members.heads.read_out(ref),
            carry_out=self._carry_out,
            spawn=self._tasks.spawn,
            log=log,
        )
        self._renewing = Renewing(
            config,
            self._members,
            self._tickets,
            self._fences,
            events=self._events,
            spawn=self._tasks.spawn,
            log=log,
        )
        self._bus = BusLife(config, self._events, self._access.material, log)
        self._admin = Admin(config, self._name, self._members, self._routers, self._tickets, self._events, self._bus)
        self._reserving: dict[str, float] = {}  # ticket -> since when its pages are being asked for
        self._reserve_wait = waits()
        self._address: str | None = None

    @property
    def address(self) -> str | None:
        return self._address

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        stack.callback(self._tasks.close)
        await self._monitor.start(stack, self._notifier, self._log)
        stack.push_async_callback(self._members.heads.close)
        inspect = InspectService(self, self._tracer, self._peers, metrics_address=self._monitor.address)
        server = Server({BROKER: self, INSPECT: inspect}, self._access.listening)
        await server.start(listen_address(self._config, self._config.broker.listen))
        self._address = self._config.broker.listen
        stack.push_async_callback(server.stop)
        await server.set_serving(True)
        self._tasks.spawn(self._recovery.run())
        self._log.info("broker is up", address=self._address)
        self._events.say(EventKind.UP, SELF, address=self._address)
        watching = [self._lag.run(), self._monitor.run(), self._members.look(), self._renewing.run()]
        return [self._tasks.run(), *watching, self._bus.serve(self._admin)]

    async def withdraw(self) -> None:
        """Heads and routers leave first; there is nothing to refuse."""

    async def idle(self) -> None:
        """Tickets are the heads' business: they have drained before the broker is told to stop."""

    # -- who is there --

    async def Join(self, reports: AsyncIterator[broker_pb2.InstanceReport], context: Any) -> None:  # noqa: N802
        await self._members.join(reports, context)

    async def Watch(  # noqa: N802
        self, request: broker_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[broker_pb2.DirectoryUpdate]:
        async for update in self._members.watch(request.router):
            yield update

    async def Attend(  # noqa: N802
        self, answers: AsyncIterator[broker_pb2.RouterAnswer], context: Any
    ) -> None:
        await self._routers.serve(answers, context)

    def _joined(self, info: InstanceInfo, legs: list[TicketLeg]) -> None:
        self._recovery.joined(info, legs)
        self._proofs.look()

    def _gathered(self) -> None:
        self._members.gathered()
        self._proofs.look()

    def _lost(self, ref: InstanceRef) -> None:
        self._carry_out(self._tickets.lose(ref))
        self._recovery.lost(ref)
        self._proofs.look()

    async def ReportReaped(  # noqa: N802
        self, request: broker_pb2.ReapedReport, context: Any
    ) -> broker_pb2.ReapedReply:
        ref = ref_from_pb(request.instance)
        pp_rank = request.pp_rank if request.HasField("pp_rank") else None
        self._log.info("processes are reaped", instance_name=ref.name, instance_epoch=ref.epoch, pp_rank=pp_rank)
        self._fences.reaped(ref, pp_rank)
        self._members.lose_until(ref, why=REAPED)
        self._proofs.look()
        return broker_pb2.ReapedReply()

    def _router_gone(self, router: str) -> None:
        self._carry_out(self._tickets.abandon(router))

    def _peers(self) -> Mapping[str, str]:
        stages = {f"{info.ref.name}/{s.pp_rank}": s.address for info in self._members for s in info.stages}
        return {"broker": self._address or "", **stages}

    # -- tickets --

    async def OpenTicket(  # noqa: N802
        self, request: broker_pb2.OpenTicketRequest, context: Any
    ) -> broker_pb2.OpenTicketReply:
        pair = ref_from_pb(request.prefill), ref_from_pb(request.decode)
        await self._recovery.until_here(*pair)
        prefill = self._members.of_role(pair[0], Role.PREFILL)
        decode = self._members.of_role(pair[1], Role.DECODE)
        if (difference := mismatch(prefill.manifest, decode.manifest)) is not None:
            raise Rejected("manifest", f"{prefill.ref} and {decode.ref} do not fit: {difference}")
        limit = decode.manifest.num_pages * decode.manifest.page_size
        if not 1 <= request.prompt_tokens <= limit:
            raise Rejected("prompt_tokens", f"must be 1..{limit} ({decode.ref}'s pages), got {request.prompt_tokens}")
        self._renewing.used(prefill.ref.name)
        ref = RequestRef(request.request_id, request.attempt)
        ticket = self._tickets.open(ref, prefill, decode, request.prompt_tokens, request.max_tokens, request.router)
        return broker_pb2.OpenTicketReply(ticket_id=ticket.ticket_id)

    async def Reserve(  # noqa: N802
        self, request: broker_pb2.ReserveRequest, context: Any
    ) -> broker_pb2.ReserveReply:
        ticket = await self._recovery.ticket(request.ticket_id)
        remaining_s = context.time_remaining()
        since_s = self._reserving[ticket.ticket_id] = time.monotonic()
        try:
            pages = await self._members.heads.reserve(ticket, RESERVE_TIMEOUT_S if remaining_s is None else remaining_s)
        finally:
            self._reserving.pop(ticket.ticket_id, None)
        self._reserve_wait.record(time.monotonic() - since_s)
        if ticket.state not in (TicketState.OPENED, TicketState.RESERVED):
            raise Cancelled(f"ticket {ticket.ticket_id} is closed: {ticket.reason}")
        self._tickets.reserved(ticket)
        decode = self._members.get(ticket.decode)
        if decode is None:
            raise Cancelled(f"ticket {ticket.ticket_id}: {ticket.decode} is lost")
        return broker_pb2.ReserveReply(pages=to_bytes(pages), targets=[stage_to_pb(s) for s in decode.stages])

    async def Fill(self, request: broker_pb2.FillRequest, context: Any) -> broker_pb2.FillReply:  # noqa: N802
        filling = self._tickets.fill(await self._recovery.ticket(request.ticket_id))
        return broker_pb2.FillReply(taken_back=not filling)

    async def Unreserve(  # noqa: N802
        self, request: broker_pb2.UnreserveRequest, context: Any
    ) -> broker_pb2.UnreserveReply:
        """Refused while the pages are being asked for: an answer that names them may be on its way."""
        if request.ticket_id in self._reserving:
            return broker_pb2.UnreserveReply(accepted=False)
        try:
            ticket = self._tickets.get(request.ticket_id)
        except Cancelled:  # the decode head hears of it by another call
            return broker_pb2.UnreserveReply(accepted=False)
        return broker_pb2.UnreserveReply(accepted=self._tickets.unreserve(ticket))

    async def ReportWriter(  # noqa: N802
        self, request: broker_pb2.WriterReport, context: Any
    ) -> broker_pb2.WriterReportReply:
        try:
            ticket = await self._recovery.ticket(request.ticket_id)
        except Cancelled:  # it is over: nobody wants to know
            return broker_pb2.WriterReportReply(broker=self._name)
        if ref_from_pb(request.instance) != ticket.prefill:
            raise ProtocolViolation(f"ticket {ticket.ticket_id} is not written by {ref_from_pb(request.instance)}")
        self._tracer.mark("report", ticket=ticket.ticket_id, pp_rank=request.pp_rank)
        spans = [PieceSpan(p.target_rank, p.first_page, p.last_page, tuple(p.crcs)) for p in request.pieces]
        outcome = WriterOutcome(tuple(spans), request.error, request.in_doubt)
        self._carry_out(self._tickets.report(ticket, request.pp_rank, outcome))
        if (committed := self._committing.get(ticket.ticket_id)) is not None:
            await committed.wait()  # until then the writer's head remembers the ticket: another broker may have to ask
        return broker_pb2.WriterReportReply(broker=self._name)

    async def FailTicket(  # noqa: N802
        self, request: broker_pb2.FailTicketRequest, context: Any
    ) -> broker_pb2.FailTicketReply:
        try:
            ticket = await self._recovery.ticket(request.ticket_id)
        except Cancelled:
            return broker_pb2.FailTicketReply()
        self._carry_out(self._tickets.fail(ticket, request.reason, quiescent=request.quiescent))
        return broker_pb2.FailTicketReply()

    # -- what follows --

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Commit():
                    self._committing.setdefault(action.ticket.ticket_id, asyncio.Event())
                    self._tasks.spawn(self._commit(action))
                case Verify():
                    self._committing[action.ticket.ticket_id] = asyncio.Event()
                    self._tasks.spawn(self._verify(action))
                case Close():
                    self._say_failure(action.ticket)
                    self._tasks.spawn(self._close(action))

    async def _verify(self, action: Verify) -> None:
        error = "its decode instance is lost"
        try:
            error = await retry(lambda: self._members.heads.verify(action))
        except PeerLost:
            pass  # its tickets have failed with it
        except StagemeshError as failure:
            error = f"its KV cannot be verified: {failure}"
        actions = self._tickets.verified(action.ticket, error)
        if not any(isinstance(follows, Commit) for follows in actions):
            self._committing.pop(action.ticket.ticket_id).set()
        self._carry_out(actions)

    def _say_failure(self, ticket: Ticket) -> None:
        """Once, and not if it is only no longer wanted."""
        if ticket.failure_said or ticket.reason == ABORTED:
            return
        ticket.failure_said = True
        self._events.say(EventKind.TICKET_FAILED, ticket.decode.name, **failure_details(ticket))

    async def _commit(self, action: Commit) -> None:
        ticket = action.ticket
        try:
            await retry(lambda: self._members.heads.commit(action))
            self._tickets.release(ticket)
        except PeerLost:
            pass  # its tickets have failed with it
        finally:
            self._committing.pop(ticket.ticket_id).set()

    async def _close(self, action: Close) -> None:
        ticket = action.ticket
        try:
            quiescent = await retry(lambda: self._members.heads.close_ticket(action))
        except PeerLost:
            return
        except StagemeshError as error:
            self._log.warning("a head refused to close a ticket", ticket_id=ticket.ticket_id, error=str(error))
            return
        if quiescent and ticket.state is TicketState.QUIESCING and action.instance == ticket.prefill:
            self._carry_out(self._tickets.fail(ticket, ticket.reason, quiescent=True))

    # -- views --

    def check_integrity(self) -> None:
        if sum(self._tickets.by_state().values()) != len(self._tickets) or self._tickets.by_state()["closed"]:
            raise Bug(f"tickets do not add up: {self._tickets.by_state()}")

    @property
    def held(self) -> Mapping[str, int]:
        tickets = len(self._tickets) + self._recovery.num_pending
        tasks = len(self._tasks) - self._recovery.gathering
        return {"tickets": tickets, "tasks": tasks, "questions": self._routers.num_asked}

    @property
    def gauges(self) -> Mapping[str, int]:
        states = {f"tickets_{state}": count for state, count in self._tickets.by_state().items()}
        outcomes = {f"closed_{outcome}": count for outcome, count in self._tickets.closed_by_outcome.items()}
        return {**states, **outcomes, "instances": len(list(self._members)), "watchers": self._members.num_watchers}

    def measure(self) -> Iterator[Sample]:
        yield from by_label(metrics.TICKETS, self._tickets.by_state())
        yield from by_label(metrics.TICKETS_CLOSED, self._tickets.closed_by_outcome)
        yield from by_label(metrics.INSTANCES, self._members.by_role)
        yield from by_label(metrics.INSTANCES_LOST, self._members.lost_by_reason)
        yield Sample(metrics.TICKETS_PROVEN, self._proofs.num_proven)
        yield from self._renewing.measure()
        yield Sample(metrics.WATCHERS, self._members.num_watchers)
        yield Sample(metrics.RESERVE_WAIT, self._reserve_wait.snapshot())
        yield from self._bus.measure()

    def describe(self) -> Iterator[Entry]:
        now_s = time.monotonic()
        for ticket in self._tickets:
            yield describe_ticket(ticket, self._reserving, now_s)
        yield from self._members.describe(now_s)


def run(config: Config, instance: str | None = None, pp_rank: int | None = None) -> None:
    """Runs the broker until it is told to stop."""
    log = configure("broker", form=choose_form(os.environ, sys.stderr))
    notifier = Notifier.from_environ(os.environ)
    service = BrokerService(config, notifier, log)
    run_to_end(service, drain_timeout_s=config.engine.drain_timeout_s, notifier=notifier, log=log)
