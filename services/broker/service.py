"""The broker as a process: the directory and the tickets behind gRPC."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from stagemesh.services.broker.admin import SELF, Admin
from stagemesh.services.broker.describe import describe_ticket
from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.follow_up import FollowUp
from stagemesh.services.broker.members import REAPED, Members
from stagemesh.services.broker.proofs import Proofs
from stagemesh.services.broker.recovery import Recovery
from stagemesh.services.broker.renewing import Renewing
from stagemesh.services.broker.routers import Routers
from stagemesh.services.broker.serving import BusLife
from stagemesh.services.broker.ticketing import Ticketing
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.codec.mesh import ref_from_pb
from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import listen_address
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.errors import Bug
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log, choose_form, configure
from stagemesh.shared.obs.metrics import Identity, Sample, by_label
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.access import mesh_access
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.inspect import INSPECT, InspectService
from stagemesh.shared.rpc.server import Server
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
        self._follow_up = FollowUp(self._tickets, self._members, self._events, self._tasks, log)
        self._recovery = Recovery(
            self._tickets,
            {instance.name: instance.pp_size for instance in config.instances},
            bound_s=config.broker.rejoin_s,
            find=self._members.get,
            carry_out=self._follow_up.carry_out,
            on_over=self._gathered,
            log=log,
        )
        self._proofs = Proofs(
            self._tickets,
            self._fences,
            read_out=lambda ref: self._members.heads.read_out(ref),
            carry_out=self._follow_up.carry_out,
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
        self._ticketing = Ticketing(
            self._name,
            self._tickets,
            self._members,
            self._recovery,
            self._follow_up,
            self._tracer,
            on_used=self._renewing.used,
        )
        self._bus = BusLife(config, self._events, self._access.material, log)
        self._admin = Admin(config, self._name, self._members, self._routers, self._tickets, self._events, self._bus)
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
        self._follow_up.carry_out(self._tickets.lose(ref))
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
        self._follow_up.carry_out(self._tickets.abandon(router))

    def _peers(self) -> Mapping[str, str]:
        stages = {f"{info.ref.name}/{s.pp_rank}": s.address for info in self._members for s in info.stages}
        return {"broker": self._address or "", **stages}

    # -- tickets --

    async def OpenTicket(  # noqa: N802
        self, request: broker_pb2.OpenTicketRequest, context: Any
    ) -> broker_pb2.OpenTicketReply:
        return await self._ticketing.open_ticket(request)

    async def Reserve(self, request: broker_pb2.ReserveRequest, context: Any) -> broker_pb2.ReserveReply:  # noqa: N802
        return await self._ticketing.reserve(request, context.time_remaining)

    async def Fill(self, request: broker_pb2.FillRequest, context: Any) -> broker_pb2.FillReply:  # noqa: N802
        return await self._ticketing.fill(request)

    async def Unreserve(  # noqa: N802
        self, request: broker_pb2.UnreserveRequest, context: Any
    ) -> broker_pb2.UnreserveReply:
        return await self._ticketing.unreserve(request)

    async def ReportWriter(  # noqa: N802
        self, request: broker_pb2.WriterReport, context: Any
    ) -> broker_pb2.WriterReportReply:
        return await self._ticketing.report_writer(request)

    async def FailTicket(  # noqa: N802
        self, request: broker_pb2.FailTicketRequest, context: Any
    ) -> broker_pb2.FailTicketReply:
        return await self._ticketing.fail_ticket(request)

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
        yield Sample(metrics.RESERVE_WAIT, self._ticketing.reserve_wait.snapshot())
        yield from self._bus.measure()

    def describe(self) -> Iterator[Entry]:
        now_s = time.monotonic()
        for ticket in self._tickets:
            yield describe_ticket(ticket, self._ticketing.reserving, now_s)
        yield from self._members.describe(now_s)


def run(config: Config, instance: str | None = None, pp_rank: int | None = None) -> None:
    """Runs the broker until it is told to stop."""
    log = configure("broker", form=choose_form(os.environ, sys.stderr))
    notifier = Notifier.from_environ(os.environ)
    service = BrokerService(config, notifier, log)
    run_to_end(service, drain_timeout_s=config.engine.drain_timeout_s, notifier=notifier, log=log)
