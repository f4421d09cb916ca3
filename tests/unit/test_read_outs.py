"""A stage reads out once for all that ask, and no longer than anybody may be waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.node import StageNode
from stagemesh.shared.stage.read_outs import ReadOuts


class Reading:
    """What an endpoint does, a round at a time."""

    def __init__(self) -> None:
        self.rounds: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.num_running = 0

    async def read_out(self) -> None:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_running += 1
        self.rounds.put_nowait(end)
        try:
            await end
        finally:
            self.num_running -= 1


@asynccontextmanager
async def running(tasks: Tasks) -> AsyncIterator[None]:
    service = asyncio.ensure_future(tasks.run())
    try:
        async with asyncio.timeout(30):
            yield
    finally:
        service.cancel()
        with suppress(asyncio.CancelledError):
            await service


def node_of(reading: Reading, tasks: Tasks) -> StageNode:
    runner = SimpleNamespace(copies=SimpleNamespace(listen=lambda _: None))
    return StageNode(
        0,
        runner=cast("Any", runner),
        executor=cast("Any", None),
        ring=cast("Any", None),
        tasks=tasks,
        kv=None,
        last=True,
        endpoint=cast("Any", reading),
        checksums=cast("Any", None),
    )


def test_questions_that_are_open_at_once_share_one_task_of_the_stage() -> None:
    async def run() -> None:
        reading, tasks = Reading(), Tasks()
        answers: asyncio.Queue[stage_pb2.Answer] = asyncio.Queue()
        async with running(tasks):
            await asyncio.sleep(0)
            node = node_of(reading, tasks)
            node.head = cast("Any", SimpleNamespace(on_answer=answers.put_nowait))
            for number in range(10):
                node.ask_read_out(number)
                await asyncio.sleep(0)
            assert len(tasks) == reading.num_running == 1
            (await reading.rounds.get()).set_result(None)
            (await reading.rounds.get()).set_result(None)
            assert [(await answers.get()).number for _ in range(10)] == list(range(10))

    asyncio.run(run())


def test_a_round_that_had_begun_before_is_no_answer() -> None:
    """It may have looked already at what the later question is about."""

    async def run() -> None:
        reading, tasks = Reading(), Tasks()
        answers: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        reads = ReadOuts(reading.read_out, spawn=tasks.spawn, answer=lambda *said: answers.put_nowait(said))
        async with running(tasks):
            reads.ask(1)
            first = await reading.rounds.get()
            reads.ask(2)
            first.set_result(None)
            assert await answers.get() == (1, "")
            second = await reading.rounds.get()
            assert answers.empty()
            second.set_exception(Rejected("transfer.protocol", "nothing shows it"))
            number, error = await answers.get()
            assert (number, "nothing shows it" in error) == (2, True)
            reads.ask(3)
            (await reading.rounds.get()).set_result(None)
            assert await answers.get() == (3, "")

    asyncio.run(run())


def test_what_nobody_waits_for_any_more_ends_and_those_who_ask_anew_are_answered() -> None:
    async def run() -> None:
        reading, tasks = Reading(), Tasks()
        answers: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        reads = ReadOuts(
            reading.read_out, spawn=tasks.spawn, answer=lambda *said: answers.put_nowait(said), patience_s=0.2
        )
        async with running(tasks):
            reads.ask(1)
            stuck = await reading.rounds.get()
            reads.ask(2)
            again = await reading.rounds.get()
            assert stuck.cancelled()
            while len(tasks):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.005)
            assert again.cancelled()
            assert (reading.num_running, answers.empty()) == (0, True)
            reads.ask(3)
            (await reading.rounds.get()).set_result(None)
            assert await answers.get() == (3, "")

    asyncio.run(run())
