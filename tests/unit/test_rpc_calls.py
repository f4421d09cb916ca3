"""Unary calls over a stream: they mind each other no more than calls of their own would."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.pb import broker_pb2, calls_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.server import Server
from tests.support.rpc_bench import LIMIT_S, FakeBroker, quick_fill, run

SHORT_S = 0.3


def test_each_call_is_answered_when_its_handler_is_through(tmp_path: Path) -> None:
    """The first ones wait; those that come later do not wait for them."""

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        gate, waiting = asyncio.Event(), asyncio.Semaphore(0)

        async def wait() -> None:
            waiting.release()
            await gate.wait()

        broker.on_fill = wait
        early = [asyncio.create_task(quick_fill(client)) for _ in range(20)]
        for _ in early:
            await waiting.acquire()
        broker.on_fill = None
        for _ in range(5):
            assert await quick_fill(client) == broker_pb2.FillReply()
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
        ends = await asyncio.gather(*(quick_fill(client) for _ in range(40)), return_exceptions=True)
        assert sum(isinstance(end, Rejected) for end in ends) == 20
        assert sum(isinstance(end, broker_pb2.FillReply) for end in ends) == 20

    run(tmp_path, body)


def test_a_call_past_its_deadline_can_be_tried_again_and_its_handler_is_cancelled(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        with pytest.raises(Retryable, match=r"in time|DEADLINE"):
            await quick_fill(client, SHORT_S)
        await broker.cancelled.wait()
        broker.on_fill = None
        await quick_fill(client)

    run(tmp_path, body)


def test_a_caller_that_is_cancelled_leaves_the_stream_to_the_others(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = broker.hang
        call = asyncio.create_task(quick_fill(client, SHORT_S))
        await broker.watching.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        broker.on_fill = None
        await quick_fill(client)
        await broker.cancelled.wait()  # by its own deadline

    run(tmp_path, body)


def test_a_method_that_is_not_for_streams_is_refused_and_the_stream_goes_on(tmp_path: Path) -> None:
    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        stream = client.open("CallStream")
        for number, method in enumerate(("FailTicket", "Fill"), start=1):
            await stream.send(calls_pb2.Call(number=number, method=method, timeout_s=LIMIT_S))
        replies = {}
        async for reply in stream.receive():
            replies[reply.number] = reply
            if len(replies) == 2:
                break
        stream.cancel()
        assert replies[1].code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        assert replies[1].details == "'FailTicket' is not called over a stream"
        assert replies[2].code == 0

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
        await quick_fill(client)

    run(tmp_path, body)


def test_a_handler_that_is_cancelled_by_others_is_answered(tmp_path: Path) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def body(broker: FakeBroker, client: Client, server: Server) -> None:
        broker.on_fill = cancelled
        with pytest.raises(Retryable, match="was cancelled"):
            await quick_fill(client)
        broker.on_fill = None
        await quick_fill(client)

    run(tmp_path, body)
