"""Server and client over a socket: how errors arrive, and what happens when one side goes."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import grpc
import pytest

from stagemesh.shared.errors import (
    Bug,
    Cancelled,
    Exhausted,
    PeerLost,
    ProtocolViolation,
    Rejected,
    Retryable,
    StagemeshError,
)
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.options import MAX_MESSAGE_BYTES
from stagemesh.shared.rpc.server import Server
from tests.support.rpc_bench import FILL, LIMIT_S, FakeBroker, fail_with, run

ERRORS = [
    pytest.param(
        Rejected("max_tokens", "must be 1..9: got 10"), Rejected, "^max_tokens: must be 1..9: got 10$", id="a"
    ),
    pytest.param(Exhausted("no room"), Exhausted, "^no room$", id="exhausted"),
    pytest.param(Retryable("away"), Retryable, "away$", id="retryable"),
    pytest.param(PeerLost("p@1 is gone"), Retryable, "p@1 is gone$", id="peer lost"),
    pytest.param(Cancelled("ticket t is closed"), Cancelled, "ticket t is closed$", id="cancelled"),
    pytest.param(ProtocolViolation("no such epoch"), ProtocolViolation, "no such epoch$", id="protocol violation"),
    pytest.param(TimeoutError("too late"), Retryable, "too late$", id="timeout"),
    pytest.param(Bug("does not add up"), Bug, "INTERNAL: Bug: does not add up$", id="bug"),
]


@pytest.mark.parametrize("way", ["call", "quick"])
@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_an_error_of_a_handler_is_the_callers_error(
    tmp_path: Path, error: Exception, kind: type[StagemeshError], message: str, way: str
) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = lambda: fail_with(error)
        with pytest.raises(kind, match=message) as caught:
            await getattr(client, way)("Fill", FILL, timeout_s=LIMIT_S)
        assert type(caught.value) is kind

    run(tmp_path, body)


def test_a_rejection_keeps_its_field(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = lambda: fail_with(Rejected("chat.messages", "must not be empty"))
        with pytest.raises(Rejected) as caught:
            await client.call("Fill", FILL, timeout_s=LIMIT_S)
        assert (caught.value.field, str(caught.value)) == ("chat.messages", "chat.messages: must not be empty")

    run(tmp_path, body)


@pytest.mark.parametrize("way", ["call", "quick"])
@pytest.mark.parametrize("after_s", [None, 1.0, 2.5, 60.0])
def test_an_exhausted_peer_says_when_to_come_back(tmp_path: Path, after_s: float | None, way: str) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = lambda: fail_with(Exhausted("no room", retry_after_s=after_s))
        with pytest.raises(Exhausted, match=r"^no room$") as caught:
            await getattr(client, way)("Fill", FILL, timeout_s=LIMIT_S)
        assert caught.value.retry_after_s == after_s

    run(tmp_path, body)


@pytest.mark.parametrize("error", [KeyError("x"), Bug("x")], ids=repr)
def test_a_handlers_own_bug_is_internal_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = lambda: fail_with(error)
        said = f"INTERNAL: {type(error).__name__}: {error}"
        with caplog.at_level(logging.ERROR), pytest.raises(Bug, match=re.escape(said)):
            await client.call("Fill", FILL, timeout_s=LIMIT_S)
        broker.on_fill = None
        await client.call("Fill", FILL, timeout_s=LIMIT_S)  # the server lives on

    run(tmp_path, body)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_error_inside_a_handlers_task_group_is_still_that_error(tmp_path: Path) -> None:
    """Handlers of streams run task groups: what a child, or the body, raises must not turn into a bug of ours."""

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            raise ProtocolViolation("epoch 1 is meant, this is 2")

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = in_a_group
        with pytest.raises(ProtocolViolation, match="epoch 1 is meant"):
            await client.call("Fill", FILL, timeout_s=LIMIT_S)

    run(tmp_path, body)


def test_a_call_past_its_deadline_can_be_tried_again_and_its_handler_is_cancelled(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        with pytest.raises(Retryable, match=r"(?i)deadline"):
            await client.call("Fill", FILL, timeout_s=0.5)
        await broker.cancelled.wait()

    run(tmp_path, body)


def test_a_caller_that_is_cancelled_cancels_the_handler(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        call = asyncio.create_task(client.call("Fill", FILL, timeout_s=LIMIT_S))
        await broker.watching.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await broker.cancelled.wait()

    run(tmp_path, body)


def test_a_channel_that_is_closed_under_a_call_is_a_lost_peer_not_a_cancellation(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        other = Client(client.address, BROKER)
        call = asyncio.create_task(other.call("Fill", FILL, timeout_s=LIMIT_S))
        await broker.watching.wait()
        await other.__aexit__(None, None, None)
        with pytest.raises(PeerLost, match="channel was closed"):
            await call
        await broker.cancelled.wait()

    run(tmp_path, body)


def test_a_server_that_stops_under_a_call_can_be_tried_again(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        call = asyncio.create_task(client.call("Fill", FILL, timeout_s=LIMIT_S))
        await broker.watching.wait()
        await server.stop()
        with pytest.raises((Retryable, Cancelled)):
            await call
        await broker.cancelled.wait()

    run(tmp_path, body)


def test_a_call_waits_for_a_server_that_comes_up_late(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"unix:{tmp_path}/late"
        async with asyncio.timeout(LIMIT_S), Client(address, BROKER) as client:
            call = asyncio.create_task(client.call("Fill", FILL, timeout_s=LIMIT_S))
            server = Server({BROKER: FakeBroker()})
            assert await server.start(address) == address
            assert await call == broker_pb2.FillReply()
            await server.stop()

    asyncio.run(main())


def test_the_brokers_client_speaks_the_brokers_words(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        called = asyncio.Event()

        async def note() -> None:
            called.set()

        broker.on_fill = note
        await BrokerClient(client).fill("t")
        assert called.is_set()
        with pytest.raises(Rejected, match="is not answered"):
            await BrokerClient(client).fail_ticket("t", "why")

    run(tmp_path, body)


def test_a_port_that_is_taken_is_rejected() -> None:
    async def main() -> None:
        first, second = Server({BROKER: FakeBroker()}), Server({BROKER: FakeBroker()})
        address = await first.start("127.0.0.1:0")
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        with pytest.raises(Rejected, match=f"cannot listen on {address}") as caught:
            await second.start(address)
        assert caught.value.field == "listen"
        await second.stop()
        await first.stop()

    asyncio.run(main())


def test_a_socket_that_a_dead_process_has_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    run(tmp_path, lambda broker, client, server: client.call("Fill", FILL, timeout_s=LIMIT_S))


@pytest.mark.parametrize("way", ["call", "quick"])
@pytest.mark.parametrize("text", ["x", "\u00e9", "\U0001f30a"])
def test_an_error_with_a_long_text_arrives_shortened(tmp_path: Path, text: str, way: str) -> None:
    """A client would get none of a status that is larger than the trailers that it takes."""

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = lambda: fail_with(Rejected("messages", text * 100_000))
        with pytest.raises(Rejected, match=r"^messages: .*bytes\)$") as caught:
            await getattr(client, way)("Fill", FILL, timeout_s=LIMIT_S)
        assert text * 100 in str(caught.value)

    run(tmp_path, body)


@pytest.mark.parametrize("method", ["Fill", "Watch"])
def test_a_message_over_the_limit_is_refused_with_the_reason(tmp_path: Path, method: str) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        channel = grpc.aio.insecure_channel(client.address)  # one that does not know our limit
        call = channel.unary_unary(f"/stagemesh.v1.Broker/{method}", request_serializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MAX_MESSAGE_BYTES + 1), timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in (caught.value.details() or "")
        await channel.close()
        await client.call("Fill", FILL, timeout_s=LIMIT_S)

    run(tmp_path, body)


def test_a_server_may_read_less_than_the_others_and_send_as_much(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server({BROKER: FakeBroker()}, max_request_bytes=1 << 10)
        address = await server.start(f"unix:{tmp_path}/s")
        async with Client(address, BROKER) as client:
            with pytest.raises(Exhausted, match=r"larger than max \(\d+ vs\. 1024\)"):
                await client.call("Fill", broker_pb2.FillRequest(ticket_id="x" * 2000), timeout_s=LIMIT_S)
            await client.call("Fill", FILL, timeout_s=LIMIT_S)
        await server.stop()

    asyncio.run(main())
