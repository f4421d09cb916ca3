"""Calling a service of the mesh: stubs made from service descriptors, errors mapped once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagemesh.shared.errors import PeerLost, Unsupported
from stagemesh.shared.rpc.calls import CALLS, QuickCalls
from stagemesh.shared.rpc.dial import PLAIN, Dial, Wire
from stagemesh.shared.rpc.duplex import Duplex, raise_if_cancelled
from stagemesh.shared.rpc.errors import from_rpc
from stagemesh.shared.security.material import Pems


class Client:
    """One channel to `address`, with the methods of any number of services.

    Raises StagemeshError's children, never gRPC's own: Rejected, Exhausted, Retryable (away, or too late), Cancelled,
    ProtocolViolation, Bug.
    """

    def __init__(self, address: str, *services: ServiceDescriptor, wait: bool = True, dial: Dial = PLAIN) -> None:
        """With `wait`, a call waits for a server that is not there (yet) until its deadline; else it fails at once.
        Calls use the certificate that `dial` has when they begin; those under way go on over the old connection."""
        self.address, self._wait, self._dial = address, wait, dial
        self._bound = [method for service in (*services, CALLS) for method in service.methods]
        self._quick = QuickCalls(address, self._bound, lambda: self.open("CallStream"), lambda: dial.pems(address))
        self._old: set[Wire] = set()  # with calls under way
        self._wire = self._connect(dial.pems(address))

    def _connect(self, pems: Pems | None) -> Wire:
        wire = Wire(self._dial.connect(self.address, pems), pems)
        wire.methods = {method.name: _bind(wire.channel, method) for method in self._bound}
        return wire

    def _begin(self, method: str, *request: Message, **options: Any) -> Any:
        pems = self._dial.pems(self.address)
        if pems is not self._wire.pems:
            if self._wire.num_calls:
                self._old.add(self._wire)
            self._wire = self._connect(pems)
        wire = self._wire
        try:
            call = wire.methods[method](*request, metadata=self._dial.metadata, **options)
        except grpc.aio.UsageError:  # a handler that outlives its service, say
            raise PeerLost(f"{self.address}: the channel is closed") from None
        wire.num_calls += 1
        call.add_done_callback(lambda _: self._ended(wire))
        return call

    def _ended(self, wire: Wire) -> None:
        wire.num_calls -= 1
        if not wire.num_calls:
            self._old.discard(wire)  # which closes it

    async def call(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """A unary call; the answer."""
        try:
            return await self._begin(method, request, timeout=timeout_s, wait_for_ready=self._wait)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from None
        except asyncio.CancelledError:
            raise_if_cancelled()
            raise PeerLost(f"{self.address}: the channel was closed") from None

    async def quick(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """The same, of a method that the peer names in QUICK, over a stream that stays open: in less than half the
        time. It waits for a peer that is not there; the peer is not told of a caller that gives up."""
        try:
            return await self._quick.call(method, request, timeout_s=timeout_s)
        except Unsupported:  # by a peer of a version before
            return await self.call(method, request, timeout_s=timeout_s)

    async def receive(
        self, method: str, request: Message, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """The answers of a server-streaming call. Closing the iterator cancels the call."""
        call = self._begin(method, request, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from None
        finally:
            call.cancel()

    def open(self, method: str) -> Duplex:
        """A stream that this side writes to, and reads from if the method answers with a stream."""
        return Duplex(self._begin(method, wait_for_ready=True), self.address)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._quick.close()
        for wire in (self._wire, *self._old):
            await wire.channel.close()
        self._old.clear()


def _bind(channel: grpc.aio.Channel, method: MethodDescriptor) -> Any:
    kind = f"{_side(method.client_streaming)}_{_side(method.server_streaming)}"
    return getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )


def _side(streaming: bool) -> str:
    return "stream" if streaming else "unary"
