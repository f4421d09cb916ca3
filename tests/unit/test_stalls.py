"""A broker that was stopped and woke: heads whose streams it has lost meanwhile come back, and are not lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.members import ENDED, STUCK, Members
from stagemesh.services.broker.stalls import STALL_S, Stalls
from stagemesh.shared.bus.events import Events
from stagemesh.shared.codec.mesh import instance_to_pb, progress_to_pb
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.runtime.tasks import Tasks
from tests.support.instances import DECODE, instance_of

D = instance_of("d", DECODE)
LIMIT_S = 30.0


def test_a_stall_is_a_look_that_comes_far_too_late() -> None:
    stalls = Stalls(3.0, now_s=100.0)
    assert (stalls.look(100.5), stalls.look(101.0), stalls.left_s(101.0)) == (0.0, 0.0, 0.0)
    assert stalls.look(101.0 + STALL_S) == STALL_S
    assert stalls.left_s(108.0) == 1.0
    assert (stalls.look(108.0), stalls.left_s(108.0), stalls.left_s(110.0)) == (0.0, 1.0, 0.0)


class Stream:
    """A head's."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[broker_pb2.InstanceReport | None] = asyncio.Queue()
        self.told = asyncio.Event()

    def report(self, *, steps_done: int = 1, has_work: bool = False, info: InstanceInfo = D) -> None:
        progress = [progress_to_pb(StageProgress(0, steps_done, has_work, 0.01))]
        self._reports.put_nowait(broker_pb2.InstanceReport(info=instance_to_pb(info), progress=progress))

    def end(self) -> None:
        self._reports.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[broker_pb2.InstanceReport]:
        while (report := await self._reports.get()) is not None:
            yield report

    async def write(self, message: Any) -> None:
        self.told.set()


class Broker:
    """Its members, on a clock of the test's."""

    def __init__(self, rejoin_s: float) -> None:
        self.now_s, self.lost = 100.0, asyncio.Queue[InstanceRef]()
        self.tasks = Tasks()
        self.members = Members(
            "b",
            self.tasks,
            Log(logging.getLogger("broker")),
            Fences(),
            on_joined=lambda *_: None,
            on_lost=self.lost.put_nowait,
            on_router_gone=lambda _: None,
            events=Events("m", "b"),
            rejoin_s=rejoin_s,
            clock=lambda: self.now_s,
        )

    def join(self, group: asyncio.TaskGroup) -> tuple[Stream, asyncio.Task[None]]:
        stream = Stream()
        stream.report()
        return stream, group.create_task(self.members.join(aiter(stream), stream))


@asynccontextmanager
async def broker(rejoin_s: float = LIMIT_S) -> AsyncIterator[tuple[Broker, asyncio.TaskGroup]]:
    made = Broker(rejoin_s)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        running = group.create_task(made.tasks.run())
        yield made, group
        running.cancel()
    await made.members.heads.close()


def test_a_head_comes_back_to_a_broker_that_has_stood_still() -> None:
    async def main() -> None:
        async with broker() as (made, group):
            stream, joined = made.join(group)
            await stream.told.wait()
            made.now_s += 3 * STALL_S
            stream.end()
            await joined
            again, _ = made.join(group)
            await again.told.wait()
            assert made.lost.empty()
            assert made.members.get(D.ref) == D
            again.end()

    asyncio.run(main())


@pytest.mark.parametrize(("away_s", "rejoin_s"), [(3 * STALL_S, 0.01), (STALL_S / 2, LIMIT_S)])
def test_one_that_does_not_come_back_is_lost_and_so_is_one_that_ends_without_a_stall(
    away_s: float, rejoin_s: float
) -> None:
    async def main() -> None:
        async with broker(rejoin_s) as (made, group):
            stream, _ = made.join(group)
            await stream.told.wait()
            made.now_s += away_s
            stream.end()
            assert await made.lost.get() == D.ref
            assert made.members.lost_by_reason == {ENDED: 1}

    asyncio.run(main())


@pytest.mark.parametrize("stalls", [True, False])
def test_a_stage_did_not_stand_still_while_the_broker_did(stalls: bool) -> None:
    """Its reports of that time are read at once."""

    async def main() -> None:
        async with broker() as (made, group):
            stream, joined = made.join(group)
            stream.report(has_work=True)
            await stream.told.wait()
            for _ in range(1 if stalls else 3):
                made.now_s += 3 * STALL_S if stalls else STALL_S - 1
                stream.report(has_work=True)
                await asyncio.sleep(0)
            stream.end()
            if stalls:
                await joined
                assert made.lost.empty()
                again, _ = made.join(group)
                await again.told.wait()
                again.end()
            else:
                assert await made.lost.get() == D.ref
                assert made.members.lost_by_reason == {STUCK: 1}

    if stalls:
        asyncio.run(main())
    else:
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(main())
        assert caught.value.subgroup(ProtocolViolation) is not None


@pytest.mark.parametrize("other", [instance_of("d", DECODE, epoch=2), instance_of("e", DECODE)], ids=["epoch", "name"])
def test_a_stream_that_reports_another_instance_than_its_own_is_a_violation(other: InstanceInfo) -> None:
    async def main() -> None:
        async with broker(0.01) as (made, _):
            stream = Stream()
            stream.report()
            stream.report(info=other)
            with pytest.raises(ExceptionGroup) as caught:
                await made.members.join(aiter(stream), stream)
            assert caught.group_contains(ProtocolViolation, match="a stream is one instance's: it was d@1, and reports")
            assert made.members.get(other.ref) is None
            assert await made.lost.get() == D.ref

    asyncio.run(main())


def test_a_life_that_a_later_one_has_replaced_leaves_no_channel() -> None:
    async def main() -> None:
        async with broker() as (made, group):
            streams = []
            for epoch in (1, 2, 3):
                stream = Stream()
                stream.report(info=replace(D, ref=InstanceRef(D.ref.name, epoch)))
                joined = group.create_task(made.members.join(aiter(stream), stream))
                await stream.told.wait()
                streams.append((stream, joined))
            for stream, joined in streams[:-1]:
                stream.end()
                await joined
            for _ in range(5):
                await asyncio.sleep(0.01)
            assert [ref.epoch for ref in made.members.heads._clients] == [3]
            streams[-1][0].end()

    asyncio.run(main())
