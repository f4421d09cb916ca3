"""A server and a client over a socket, with services that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import broker_pb2, stage_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.server import Server
from tests.support.doubles import Partial

LIMIT_S = 30.0
FILL = broker_pb2.FillRequest(ticket_id="t")


async def fail_with(error: Exception) -> Any:
    raise error


async def quick_fill(client: Client, timeout_s: float = LIMIT_S) -> broker_pb2.FillReply:
    """A call over the client's stream."""
    reply: broker_pb2.FillReply = await client.quick("Fill", FILL, timeout_s=timeout_s)
    return reply


class FakeBroker(Partial):
    """Does what a test says. A hook that is not set is not called."""

    QUICK: ClassVar = frozenset({"Fill"})

    def __init__(self) -> None:
        self.on_fill: Callable[[], Awaitable[None]] | None = None
        self.watching, self.cancelled, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.updates: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def Fill(self, request: broker_pb2.FillRequest, context: Any) -> broker_pb2.FillReply:  # noqa: N802
        if self.on_fill is not None:
            await self.on_fill()
        return broker_pb2.FillReply()

    async def Watch(  # noqa: N802
        self, request: broker_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[broker_pb2.DirectoryUpdate]:
        """An update for each None, until it is cancelled or an error comes."""
        self.watching.set()
        try:
            while (update := await self.updates.get()) is None:
                yield broker_pb2.DirectoryUpdate(snapshot=True)
            raise update
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Join(self, reports: AsyncIterator[broker_pb2.InstanceReport], context: Any) -> None:  # noqa: N802
        """Answers every report; ends with one that leaves, and refuses one that leaves its work behind."""
        try:
            async for report in reports:
                if report.leaving and not report.has_work:
                    return
                if report.leaving:
                    raise ProtocolViolation("not yet")
                await context.write(broker_pb2.DirectoryUpdate(snapshot=report.has_work))
                self.watching.set()
        finally:
            self.left.set()

    async def hang(self) -> None:
        self.watching.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class FakeStage:
    """Reads a ring to its end, or refuses it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.num_messages = error, 0

    async def Ring(  # noqa: N802
        self, messages: AsyncIterator[stage_pb2.RingMessage], context: Any
    ) -> stage_pb2.RingClosed:
        async for _ in messages:
            self.num_messages += 1
            if self.error is not None:
                raise self.error
        return stage_pb2.RingClosed()

    async def Connect(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


Body = Callable[[FakeBroker, Client, Server], Awaitable[None]]


def run(tmp_path: Path, body: Body) -> None:
    """`body` with a server and a client that are connected; nothing is left afterwards."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            broker = FakeBroker()
            server = Server({BROKER: broker})
            address = await server.start(f"unix:{tmp_path}/s")
            try:
                async with Client(address, BROKER) as client:
                    await body(broker, client, server)
            finally:
                await server.stop()

    asyncio.run(main())
