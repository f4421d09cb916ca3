"""What the broker makes of reports that processes are reaped, and of stages that stand still."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.progress import ProgressWatch
from stagemesh.services.broker.service import BrokerService
from stagemesh.services.broker.ticket import Close, Commit
from stagemesh.shared.codec.mesh import ref_to_pb
from stagemesh.shared.config import BrokerSection, MeshSection, MetricsSection, NatsSection, TlsSection
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.progress import STANDSTILL_S, STEPS, StageProgress
from stagemesh.shared.errors import Bug, Cancelled, PeerLost, ProtocolViolation, StagemeshError
from stagemesh.shared.fsm.ticket import TicketState
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.runtime.notify import Notifier
from tests.support.instances import DECODE, PREFILL, instance_of

P1, P2, D1 = InstanceRef("p", 1), InstanceRef("p", 2), InstanceRef("d", 1)


def test_an_epoch_is_reaped_when_each_of_its_stages_is() -> None:
    fences = Fences()
    fences.reaped(P1, 0)
    assert not fences.are_reaped(P1, 2)
    fences.reaped(P1, 1)
    assert fences.are_reaped(P1, 2)
    assert not fences.are_reaped(P2, 2)
    assert not fences.are_reaped(D1, 2)


def test_a_report_is_about_its_epoch_and_all_before_it() -> None:
    fences = Fences()
    fences.reaped(P2, None)
    assert fences.are_reaped(P1, 3)
    assert (fences.is_lost(P1), fences.is_lost(P2), fences.is_lost(InstanceRef("p", 3))) == (True, True, False)
    fences.reaped(P1, None)  # late
    assert fences.are_reaped(P2, 3)


def stage(rank: int, steps: int, *, has_work: bool = True, step_s: float = 0.01) -> StageProgress:
    return StageProgress(rank, steps, has_work, step_s)


def test_a_stage_that_stands_still_with_work_is_stuck() -> None:
    watch = ProgressWatch()
    assert watch.stuck(P1, [stage(0, 5), stage(1, 5)], 10.0) == ""
    assert watch.stuck(P1, [stage(0, 6), stage(1, 5)], 12.9) == ""
    assert "stage 1 has stood still at step 5 for 3.0 s" in watch.stuck(P1, [stage(0, 7), stage(1, 5)], 13.0)
    watch.forget(P1)
    assert watch.stuck(P1, [stage(1, 5)], 13.1) == ""


def test_a_stage_without_work_is_not_stuck_and_its_clock_begins_with_the_work() -> None:
    watch = ProgressWatch()
    for now_s in (0.0, 100.0):
        assert watch.stuck(P1, [stage(0, 5, has_work=False)], now_s) == ""
    assert watch.stuck(P1, [stage(0, 5)], 100.0 + STANDSTILL_S - 0.1) == ""
    assert watch.stuck(P1, [stage(0, 5)], 100.0 + STANDSTILL_S)


def test_the_slowest_stage_of_an_instance_sets_its_patience() -> None:
    watch = ProgressWatch()
    slow = [stage(0, 5, step_s=2.0), stage(1, 5)]
    assert watch.stuck(P1, slow, 0.0) == ""
    assert watch.stuck(P1, slow, 2.0 * STEPS - 0.1) == ""
    assert watch.stuck(P1, slow, 2.0 * STEPS)


class Heads:
    """Keeps what they are told; reads out when it is told to."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, bool]] = []
        self.asked, self.read = asyncio.Event(), asyncio.Event()
        self.done = asyncio.Event()
        self.is_gone = False
        self.commit_error: StagemeshError | None = None

    async def commit(self, action: Commit) -> bool:
        if self.commit_error is not None:
            raise self.commit_error
        return True

    def add(self, info: object) -> None: ...

    async def remove(self, ref: InstanceRef) -> None: ...

    async def close_ticket(self, action: Close) -> bool:
        if action.instance == P1:
            raise PeerLost("gone")
        self.closed.append((action.instance.name, action.quiesced))
        if action.quiesced:
            self.done.set()
        return False

    async def read_out(self, ref: InstanceRef) -> None:
        assert ref == D1
        self.asked.set()
        await self.read.wait()
        if self.is_gone:
            raise PeerLost(f"{ref} is gone")


class Broker:
    """With one pair of instances and a ticket between them that is being filled."""

    def __init__(self) -> None:
        sections = {"metrics": MetricsSection(), "tls": TlsSection(), "broker": BrokerSection(listen="unix:b")}
        config = cast(
            "Any", SimpleNamespace(**sections, mesh=MeshSection(run_dir="/run"), nats=NatsSection(), instances=())
        )
        self.service, self.heads = BrokerService(config, Notifier(None), Log(logging.getLogger("test"))), Heads()
        self.members = self.service._members
        self.members.heads = cast("Any", self.heads)
        pair = [instance_of("p", PREFILL, sizes=(2, 2)), instance_of("d", DECODE)]
        for info in pair:
            self.members._report(info)
        self.book = self.service._tickets
        self.ticket = self.book.open(RequestRef("r", 1), pair[0], pair[1], 8, 4)
        self.book.reserved(self.ticket)
        self.book.fill(self.ticket)

    async def reaped(self, pp_rank: int | None, ref: InstanceRef = P1) -> None:
        report = broker_pb2.ReapedReport(instance=ref_to_pb(ref), pp_rank=pp_rank)
        await self.service.ReportReaped(report, None)


def with_broker(follow: Any) -> None:
    async def run() -> None:
        broker = Broker()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            running = group.create_task(broker.service._tasks.run())
            await asyncio.sleep(0)
            await follow(broker)
            running.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("ranks", [(None,), (0, 1), (1, 0)])
def test_pages_are_free_once_all_writers_are_reaped_and_the_target_has_read_what_they_sent(
    ranks: tuple[int | None, ...],
) -> None:
    async def follow(broker: Broker) -> None:
        for rank in ranks:
            assert not broker.heads.asked.is_set()
            await broker.reaped(rank)
        await broker.heads.asked.wait()
        assert broker.members.get(P1) is None
        assert (broker.ticket.state, broker.heads.closed) == (TicketState.QUIESCING, [("d", False)])
        broker.heads.read.set()
        await broker.heads.done.wait()
        assert (broker.ticket.state, broker.heads.closed[1:]) == (TicketState.CLOSED, [("d", True)])
        assert (len(broker.book), broker.service._proofs.num_proven) == (0, 1)

    with_broker(follow)


def test_a_proof_for_another_epoch_is_none() -> None:
    async def follow(broker: Broker) -> None:
        await broker.members._gone(P1, why="it is silent")
        await broker.reaped(None, InstanceRef("p", 0))
        await broker.reaped(None, InstanceRef("d", 0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not broker.heads.asked.is_set()
        assert broker.ticket.state is TicketState.QUIESCING

    with_broker(follow)


def test_a_decode_instance_that_goes_meanwhile_needs_no_proof() -> None:
    async def follow(broker: Broker) -> None:
        await broker.reaped(None)
        await broker.heads.asked.wait()
        broker.heads.is_gone = True
        await broker.members._gone(D1, why="it is silent")
        broker.heads.read.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(broker.book), broker.service._proofs.num_proven) == (0, 0)

    with_broker(follow)


def test_an_epoch_that_was_lost_does_not_come_back() -> None:
    async def follow(broker: Broker) -> None:
        await broker.members._gone(P1, why="it is silent")
        with pytest.raises(ProtocolViolation, match="p@1 is lost: it must start again, under a new epoch"):
            broker.members._report(instance_of("p", PREFILL))
        broker.members._report(instance_of("p", PREFILL, epoch=2))
        assert broker.members.get(P2) is not None
        assert broker.members.lost_by_reason == {"it is silent": 1}

    with_broker(follow)


@pytest.mark.parametrize("error", [ProtocolViolation("epoch 1 is meant, this is 2"), Cancelled("it ends"), Bug("")])
def test_a_head_that_refuses_a_commit_costs_its_ticket_and_not_the_broker(error: StagemeshError) -> None:
    async def follow(broker: Broker) -> None:
        broker.heads.commit_error = error
        for writer in range(2):
            pieces = [broker_pb2.PieceRange(target_rank=leg.target, last_page=2) for leg in broker.ticket.legs]
            report = broker_pb2.WriterReport(
                ticket_id=broker.ticket.ticket_id, instance=ref_to_pb(P1), pp_rank=writer, pieces=pieces
            )
            await broker.service.ReportWriter(report, None)
        await broker.heads.done.wait()
        assert broker.heads.closed == [("d", True)]
        assert "its commit was refused" in broker.ticket.reason
        assert (len(broker.book), broker.book.closed_by_outcome["failed"]) == (0, 1)

    with_broker(follow)
