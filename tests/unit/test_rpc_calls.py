"""Unary calls over a stream: they mind each other no more than calls of their own would."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

from stagemesh.shared.errors import Bug, PeerLost, ProtocolViolation, Rejected, Retryable, StagemeshError, Unreachable
from stagemesh.shared.pb import broker_pb2, calls_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.duplex import Duplex
from stagemesh.shared.rpc.errors import from_status
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.backoff import retry
from tests.support.rpc_bench import FILL, LIMIT_S, FakeBroker, run

SHORT_S = 0.3


async def fail_with(error: Exception) -> Any:
    raise error


async def fill(client: Client, timeout_s: float = LIMIT_S) -> broker_pb2.FillReply:
    reply: broker_pb2.FillReply = await client.quick("Fill", FILL, timeout_s=timeout_s)
    return reply


def test_each_call_is_answered_when_its_handler_is_through(tmp_path: Path) -> None:
    """The first ones wait; those that come later do not wait for them."""

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        gate, waiting = asyncio.Event(), asyncio.Semaphore(0)

        async def wait() -> None:
            waiting.release()
            await gate.wait()

        broker.on_fill = wait
        early = [asyncio.create_task(fill(client)) for _ in range(20)]
        for _ in early:
            await waiting.acquire()
        broker.on_fill = None
        for _ in range(5):
            assert await fill(client) == broker_pb2.FillReply()
        assert not any(task.done() for task in early)
        gate.set()
        assert await asyncio.gather(*early) == [broker_pb2.FillReply()] * 20

    run(tmp_path, body)


def test_a_call_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        count = 0

        async def every_other() -> None:
            nonlocal count
            count += 1
            if count % 2:
                raise Rejected("ticket_id", f"is the {count}th")

        broker.on_fill = every_other
        ends = await asyncio.gather(*(fill(client) for _ in range(40)), return_exceptions=True)
        assert sum(isinstance(end, Rejected) for end in ends) == 20
        assert sum(isinstance(end, broker_pb2.FillReply) for end in ends) == 20

    run(tmp_path, body)


def test_a_call_past_its_deadline_can_be_tried_again_and_its_handler_is_cancelled(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        with pytest.raises(Retryable, match=r"in time|DEADLINE"):
            await fill(client, SHORT_S)
        await broker.cancelled.wait()
        broker.on_fill = None
        await fill(client)

    run(tmp_path, body)


def test_a_caller_that_is_cancelled_leaves_the_stream_to_the_others(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        call = asyncio.create_task(fill(client, SHORT_S))
        await broker.watching.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        broker.on_fill = None
        await fill(client)
        await broker.cancelled.wait()  # by its own deadline

    run(tmp_path, body)


def test_a_channel_that_is_closed_under_a_call_is_a_lost_peer_not_a_cancellation(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        other = Client(client.address, BROKER)
        call = asyncio.create_task(fill(other))
        await broker.watching.wait()
        await other.__aexit__(None, None, None)
        with pytest.raises(PeerLost, match="channel was closed"):
            await call
        await broker.cancelled.wait()
        with pytest.raises(PeerLost, match="channel is closed"):
            await fill(other)

    run(tmp_path, body)


def test_a_server_that_stops_under_calls_can_be_tried_again_when_another_is_there(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        calls = [asyncio.create_task(fill(client)) for _ in range(3)]
        await broker.watching.wait()
        await server.stop()
        for call in calls:
            with pytest.raises(Unreachable):
                await call
        await broker.cancelled.wait()
        again = asyncio.create_task(fill(client))
        other = Server({BROKER: FakeBroker()})
        await other.start(client.address)
        assert await again == broker_pb2.FillReply()
        await other.stop()

    run(tmp_path, body)


def test_what_was_given_up_before_the_server_came_is_not_sent(tmp_path: Path) -> None:
    async def main() -> None:
        address, broker = f"unix:{tmp_path}/late", FakeBroker()
        count = 0

        async def note() -> None:
            nonlocal count
            count += 1

        broker.on_fill = note
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            given_up = [asyncio.create_task(fill(client, SHORT_S)) for _ in range(5)]
            for call in given_up:
                with pytest.raises(Unreachable, match="in time"):
                    await call
            waiting = asyncio.create_task(fill(client))
            server = Server({BROKER: broker})
            await server.start(address)
            await waiting
            await server.stop()
        assert count <= 2, "the one that was being sent may have gone out"

    asyncio.run(main())


def test_a_method_that_is_not_for_streams_is_refused_and_the_stream_goes_on(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        with pytest.raises(ProtocolViolation, match="'FailTicket' is not called over a stream"):
            await client.quick("FailTicket", broker_pb2.FailTicketRequest(), timeout_s=LIMIT_S)
        await fill(client)

    run(tmp_path, body)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_deadline_that_is_none_is_refused(tmp_path: Path, timeout_s: float) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        stream = client.open("CallStream")
        await stream.send(calls_pb2.Call(number=1, method="Fill", timeout_s=timeout_s))
        async for reply in stream.receive():
            assert reply.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
            assert "timeout_s" in reply.details
            break
        stream.cancel()

    run(tmp_path, body)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    """A request that is none costs its call; a message that is no call, the stream."""

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        stream = client.open("CallStream")
        await stream.send(calls_pb2.Call(number=7, method="Fill", request=b"\xff\xff", timeout_s=1.0))
        async for reply in stream.receive():
            assert (reply.number, reply.code) == (7, grpc.StatusCode.INVALID_ARGUMENT.value[0])
            break
        stream.cancel()
        channel = grpc.aio.insecure_channel(client.address)
        junk = channel.stream_stream("/stagemesh.v1.Calls/CallStream")()
        await junk.write(b"\xff\xff")
        assert await junk.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()
        await fill(client)

    run(tmp_path, body)


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_a_server_that_comes_and_goes_under_calls_is_unreachable_and_never_a_bug(tmp_path: Path, where: str) -> None:
    """Among others when a message is being written: the library calls that an internal error."""
    kinds = Counter[str]()

    async def ask(client: Client, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await fill(client, 5.0)
                kinds["answered"] += 1
            except StagemeshError as error:
                kinds[type(error).__name__] += 1
                await asyncio.sleep(0.001)

    async def main() -> None:
        address = f"unix:{tmp_path}/s" if where == "unix" else "127.0.0.1:0"
        stop, dice = asyncio.Event(), random.Random(1)
        server = Server({BROKER: FakeBroker()})
        address = await server.start(address)
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client, asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(ask(client, stop))
            for _ in range(40):
                await asyncio.sleep(dice.random() * 0.03)
                await server.stop()
                server = Server({BROKER: FakeBroker()})
                await server.start(address)
            stop.set()
        await server.stop()

    asyncio.run(main())
    assert set(kinds) == {"answered", "Unreachable"}


def test_what_the_library_calls_internal_where_a_connection_breaks_is_unreachable() -> None:
    error = from_status(grpc.StatusCode.INTERNAL, "Internal error from Core", "there", has_answered=False)
    assert type(error) is Unreachable
    assert type(from_status(grpc.StatusCode.INTERNAL, "KeyError: 1", "there", has_answered=True)) is Bug


def test_a_stream_that_fails_here_is_no_word_on_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Duplex) -> AsyncIterator[Any]:
        yield await fail_with(ValueError("what came is no message"))

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Duplex, "receive", broken)
            with pytest.raises(Unreachable, match="what came is no message"):
                await fill(client)
        await fill(client)

    run(tmp_path, body)


def test_a_peer_of_a_version_before_is_called_without_a_stream(tmp_path: Path) -> None:
    """If not at once: a refusal that comes under our write is taken for a connection that has broken."""

    class OldBroker(FakeBroker):
        QUICK: ClassVar = frozenset[str]()

    async def main() -> None:
        server = Server({BROKER: OldBroker()})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            assert await retry(lambda: fill(client)) == broker_pb2.FillReply()
            await server.stop()
            server = Server({BROKER: FakeBroker()})
            await server.start(address)
            assert await retry(lambda: fill(client)) == broker_pb2.FillReply()
        await server.stop()

    asyncio.run(main())


def test_a_peer_that_is_away_costs_no_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with Client(f"unix:{tmp_path}/nobody", BROKER) as client:
            for _ in range(20):
                with pytest.raises(Unreachable):
                    await fill(client, 0.01)
            stream = client._quick._stream
            assert stream is not None
            assert len(stream._waiting) == 0
            assert len(stream._unsent) == 0

    asyncio.run(main())


@pytest.mark.parametrize("ticks", range(4))
def test_a_channel_that_is_closed_at_once_lets_nobody_wait(tmp_path: Path, ticks: int) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        other = Client(client.address, BROKER)
        call = asyncio.create_task(fill(other))
        for _ in range(1 + ticks):
            await asyncio.sleep(0)
        await other.__aexit__(None, None, None)
        with pytest.raises(PeerLost):
            await call

    run(tmp_path, body)


def test_a_handler_that_is_cancelled_by_others_is_answered(tmp_path: Path) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = cancelled
        with pytest.raises(Retryable, match="was cancelled"):
            await fill(client)
        broker.on_fill = None
        await fill(client)

    run(tmp_path, body)


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        async with Client(client.address, BROKER) as other:
            await asyncio.gather(*(fill(other) for _ in range(10)))
            assert any("_Stream._run" in repr(task) for task in asyncio.all_tasks())
        assert not any("_Stream._run" in repr(task) for task in asyncio.all_tasks())

    run(tmp_path, body)
