"""The stream that calls share ends, or is not there: whoever waits hears of it, may try again, and leaves nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

from stagemesh.shared.errors import Bug, PeerLost, StagemeshError, Unreachable
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.duplex import Duplex
from stagemesh.shared.rpc.errors import from_status
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.backoff import retry
from tests.support.rpc_bench import LIMIT_S, FakeBroker, fail_with, quick_fill, run

SHORT_S = 0.3


def test_a_channel_that_is_closed_under_a_call_is_a_lost_peer_not_a_cancellation(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        other = Client(client.address, BROKER)
        call = asyncio.create_task(quick_fill(other))
        await broker.watching.wait()
        await other.__aexit__(None, None, None)
        with pytest.raises(PeerLost, match="channel was closed"):
            await call
        await broker.cancelled.wait()
        with pytest.raises(PeerLost, match="channel is closed"):
            await quick_fill(other)

    run(tmp_path, body)


def test_a_server_that_stops_under_calls_can_be_tried_again_when_another_is_there(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        calls = [asyncio.create_task(quick_fill(client)) for _ in range(3)]
        await broker.watching.wait()
        await server.stop()
        for call in calls:
            with pytest.raises(Unreachable):
                await call
        await broker.cancelled.wait()
        again = asyncio.create_task(quick_fill(client))
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
            given_up = [asyncio.create_task(quick_fill(client, SHORT_S)) for _ in range(5)]
            for call in given_up:
                with pytest.raises(Unreachable, match="in time"):
                    await call
            waiting = asyncio.create_task(quick_fill(client))
            server = Server({BROKER: broker})
            await server.start(address)
            await waiting
            await server.stop()
        assert count <= 2, "the one that was being sent may have gone out"

    asyncio.run(main())


@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_a_server_that_comes_and_goes_under_calls_is_unreachable_and_never_a_bug(tmp_path: Path, where: str) -> None:
    """Among others when a message is being written: the library calls that an internal error."""
    kinds = Counter[str]()

    async def ask(client: Client, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await quick_fill(client, 5.0)
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
                await quick_fill(client)
        await quick_fill(client)

    run(tmp_path, body)


def test_a_peer_of_a_version_before_is_called_without_a_stream(tmp_path: Path) -> None:
    """If not at once: a refusal that comes under our write is taken for a connection that has broken."""

    class OldBroker(FakeBroker):
        QUICK: ClassVar = frozenset[str]()

    async def main() -> None:
        server = Server({BROKER: OldBroker()})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            assert await retry(lambda: quick_fill(client)) == broker_pb2.FillReply()
            await server.stop()
            server = Server({BROKER: FakeBroker()})
            await server.start(address)
            assert await retry(lambda: quick_fill(client)) == broker_pb2.FillReply()
        await server.stop()

    asyncio.run(main())


def test_a_peer_that_is_away_costs_no_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with Client(f"unix:{tmp_path}/nobody", BROKER) as client:
            for _ in range(20):
                with pytest.raises(Unreachable):
                    await quick_fill(client, 0.01)
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
        call = asyncio.create_task(quick_fill(other))
        for _ in range(1 + ticks):
            await asyncio.sleep(0)
        await other.__aexit__(None, None, None)
        with pytest.raises(PeerLost):
            await call

    run(tmp_path, body)


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        async with Client(client.address, BROKER) as other:
            await asyncio.gather(*(quick_fill(other) for _ in range(10)))
            assert any("_Stream._run" in repr(task) for task in asyncio.all_tasks())
        assert not any("_Stream._run" in repr(task) for task in asyncio.all_tasks())

    run(tmp_path, body)


def test_a_peer_whose_stream_does_not_know_the_method_is_called_without_it(tmp_path: Path) -> None:
    class Older(FakeBroker):
        QUICK: ClassVar = frozenset({"ReportWriter"})

        async def ReportWriter(self, request: Any, context: Any) -> Any:  # noqa: N802
            return broker_pb2.WriterReportReply()

    async def main() -> None:
        server = Server({BROKER: Older()})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            assert await quick_fill(client) == broker_pb2.FillReply()
        await server.stop()

    asyncio.run(main())


def test_a_server_that_is_no_broker_is_a_broker_that_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server({})
        address = await server.start(f"unix:{tmp_path}/s")
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            for call in (BrokerClient(client).fill("t"), BrokerClient(client).fail_ticket("t", "gone")):
                with pytest.raises(Unreachable):
                    await call
        await server.stop()

    asyncio.run(main())
