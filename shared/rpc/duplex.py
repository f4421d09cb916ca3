"""A stream that this side writes to, and reads from if the method answers with a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message

from stagemesh.shared.errors import PeerLost, StagemeshError
from stagemesh.shared.rpc.errors import from_rpc


class Duplex:
    """An open stream."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call, self._peer = call, peer

    async def send(self, message: Message) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._peer) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError):  # the call is over already
            raise await self._ended() from None
        except asyncio.CancelledError:
            raise_if_cancelled()
            raise PeerLost(f"{self._peer}: the stream was closed") from None

    async def _ended(self) -> StagemeshError:
        """Why the peer has ended the stream."""
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return PeerLost(f"{self._peer} has ended the stream")
        return from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details), self._peer)

    async def receive(self) -> AsyncIterator[Any]:
        """What the peer sends, until it ends the stream."""
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._peer) from None

    async def finish(self) -> Any:
        """Ends this side of the stream and returns the answer, where the method has a single one."""
        try:
            await self._call.done_writing()
            return await self._call
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._peer) from None

    def cancel(self) -> None:
        self._call.cancel()


def raise_if_cancelled() -> None:
    """In the handling of a CancelledError: raises it on if it is meant for this task. gRPC has no other word for a call
    that was ended under it."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise asyncio.CancelledError
