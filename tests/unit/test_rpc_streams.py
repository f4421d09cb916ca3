"""Streams between client and server, and what happens when one side goes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from stagemesh.shared.errors import Exhausted, PeerLost, ProtocolViolation, Retryable
from stagemesh.shared.pb import broker_pb2, stage_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.server import Server, Writes
from stagemesh.shared.stage.ring import STAGE_LINK
from tests.support.rpc_bench import LIMIT_S, FakeBroker, FakeStage, run


def test_a_stream_of_answers(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        for update in (None, None, Exhausted("too many watch")):
            broker.updates.put_nowait(update)
        updates = client.receive("Watch", broker_pb2.WatchRequest())
        assert [(await anext(updates)).snapshot for _ in range(2)] == [True, True]
        with pytest.raises(Exhausted, match="too many watch"):
            await anext(updates)

    run(tmp_path, body)


def test_a_reader_that_leaves_cancels_the_handler_that_waits(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.updates.put_nowait(None)
        updates = client.receive("Watch", broker_pb2.WatchRequest())
        assert (await anext(updates)).snapshot
        await updates.aclose()
        await broker.cancelled.wait()

    run(tmp_path, body)


@pytest.mark.parametrize("how", ["the stream is cancelled", "the client is gone"])
def test_the_handler_of_a_stream_ends_with_its_client(tmp_path: Path, how: str) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        other = Client(client.address, BROKER)
        stream = other.open("Join")
        await stream.send(broker_pb2.InstanceReport(has_work=True))
        await broker.watching.wait()
        if how == "the stream is cancelled":
            stream.cancel()
            await broker.left.wait()
        await other.__aexit__(None, None, None)
        await broker.left.wait()

    run(tmp_path, body)


def test_both_ways_at_once(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        stream = client.open("Join")
        answers = stream.receive()
        for has_work in (True, False):
            await stream.send(broker_pb2.InstanceReport(has_work=has_work))
            assert (await anext(answers)).snapshot == has_work
        stream.cancel()

    run(tmp_path, body)


def test_a_stream_that_is_finished_is_read_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        stage = FakeStage()
        server = Server({STAGE_LINK: stage})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, STAGE_LINK) as client:
            stream = client.open("Ring")
            for _ in range(3):
                await stream.send(stage_pb2.RingMessage())
            assert await stream.finish() == stage_pb2.RingClosed()
        assert stage.num_messages == 3
        await server.stop()

    asyncio.run(main())


def test_a_stream_that_was_refused_says_so_when_it_is_finished(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server({STAGE_LINK: FakeStage(ProtocolViolation("a previous stage already"))})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, STAGE_LINK) as client:
            stream = client.open("Ring")
            await stream.send(stage_pb2.RingMessage())
            with pytest.raises(ProtocolViolation, match="a previous stage already"):
                await stream.finish()
        await server.stop()

    asyncio.run(main())


def test_a_stream_that_the_server_ends_tells_the_writer_why(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        stream = client.open("Join")
        await stream.send(broker_pb2.InstanceReport(leaving=True, has_work=True))
        with pytest.raises(ProtocolViolation, match="not yet"):
            await anext(stream.receive())
        with pytest.raises(ProtocolViolation, match="not yet"):
            await stream.send(broker_pb2.InstanceReport())

    run(tmp_path, body)


def test_a_stream_that_is_over_takes_no_more(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        stream = client.open("Join")
        await stream.send(broker_pb2.InstanceReport(leaving=True))
        assert [answer async for answer in stream.receive()] == []
        with pytest.raises((PeerLost, Retryable), match=client.address):
            await stream.send(broker_pb2.InstanceReport())

    run(tmp_path, body)


def test_a_channel_that_is_closed_is_a_peer_lost(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        async with Client(client.address, BROKER) as other:
            pass
        with pytest.raises(PeerLost, match="the channel is closed"):
            await other.call("OpenTicket", broker_pb2.OpenTicketRequest(), timeout_s=LIMIT_S)
        with pytest.raises(PeerLost, match="the channel is closed"):
            await anext(other.receive("Watch", broker_pb2.WatchRequest()))
        with pytest.raises(PeerLost, match="the channel is closed"):
            other.open("Join")

    run(tmp_path, body)


class Broken:
    """The context of a call whose connection breaks while an answer is written."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.writing, self.breaks = asyncio.Event(), asyncio.Event()

    async def write(self, message: Any) -> None:
        self.writing.set()
        await self.breaks.wait()
        raise self._error


@pytest.mark.parametrize("error", [grpc.aio.InternalError("execute_batch"), grpc.aio.UsageError("is stopped")])
def test_an_answer_that_nobody_can_read_is_a_peer_lost(error: Exception) -> None:
    async def body() -> None:
        context = Broken(error)
        context.breaks.set()
        with pytest.raises(PeerLost, match=str(error)):
            await Writes(context).write(broker_pb2.DirectoryUpdate())

    asyncio.run(body())


def test_a_write_that_fails_after_its_task_was_cancelled_is_no_news() -> None:
    told: list[dict[str, Any]] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: told.append(about))
        context = Broken(grpc.aio.InternalError("execute_batch"))
        writes = Writes(context)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(writes.write(broker_pb2.DirectoryUpdate()))
            await context.writing.wait()
            task.cancel()
        context.breaks.set()
        await writes.settled()
        del writes, context
        gc.collect()

    asyncio.run(body())
    assert told == []


def test_a_handler_that_fails_while_it_writes_still_ends_its_call(tmp_path: Path) -> None:
    """gRPC forgets the status of a call whose handler has given up a write: the client would wait for ever."""

    class Broker(FakeBroker):
        async def Join(self, reports: AsyncIterator[broker_pb2.InstanceReport], context: Any) -> None:  # noqa: N802
            async with asyncio.TaskGroup() as group:
                group.create_task(context.write(broker_pb2.DirectoryUpdate(snapshot=True)))
                async for _ in reports:
                    raise ProtocolViolation("replaced")

    async def main() -> None:
        server = Server({BROKER: Broker()})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            for _ in range(20):
                stream = client.open("Join")
                await stream.send(broker_pb2.InstanceReport())
                with pytest.raises(ProtocolViolation, match="replaced"):
                    async for _ in stream.receive():
                        pass
        await server.stop()

    asyncio.run(main())
