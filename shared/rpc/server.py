"""Serving: handlers made from service descriptors, health and reflection on every server, errors mapped once."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stagemesh.shared.errors import PeerLost, Rejected
from stagemesh.shared.rpc.calls import CALLS, CallService, quick_methods
from stagemesh.shared.rpc.errors import answer_of, trailing_metadata_of
from stagemesh.shared.rpc.guard import PLAIN_PORT, Callers, Gate, Listening
from stagemesh.shared.rpc.messages import read_message
from stagemesh.shared.rpc.options import MAX_MESSAGE_BYTES, server_options

WRITE_LIMIT_S: Final = 2.0


class Server:
    """A gRPC server at one address. An implementation has one method a rpc, named as in the proto, that takes the
    request (or an iterator of them) and the context. A streaming answer is an async generator, or a coroutine that
    calls `context.write`. Methods that it names in NOT_SERVED, of a proto that is not ours, are UNIMPLEMENTED.
    Unary ones that it names in QUICK may be called over a stream as well, see `calls`."""

    def __init__(
        self,
        services: Mapping[ServiceDescriptor, object],
        listening: Listening = PLAIN_PORT,
        callers: Callers | None = None,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`callers` are who may call, but for health; None: whoever gets a connection. Messages over
        `max_request_bytes` are RESOURCE_EXHAUSTED before they are parsed."""
        self._listening = listening
        self._server = grpc.aio.server(
            interceptors=[Gate(callers)] if callers and callers.is_checked else [],
            options=server_options(max_request_bytes),
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if quick := quick_methods(services):
            services = {**services, CALLS: CallService(quick)}
        for service, implementation in services.items():
            served = (method for method in service.methods if method.name not in not_served(implementation))
            handlers = {method.name: _handler(method, implementation) for method in served}
            generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        names = [service.full_name for service in services]
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, address: str) -> str:
        """Listens and returns the address, with its port if 0 was asked for. Raises Rejected if it is taken."""
        if address.startswith("unix:"):
            _remove_stale_socket(address.removeprefix("unix:"))
        try:
            port = self._listening.add_port(self._server, address)
        except RuntimeError as error:
            raise Rejected("listen", f"cannot listen on {address}: is it in use? ({error})") from None
        await self._server.start()
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new calls, gives running ones `grace_s` seconds, cancels the rest."""
        await self._server.stop(grace_s)


def not_served(implementation: object) -> frozenset[str]:
    return getattr(type(implementation), "NOT_SERVED", frozenset())


def _remove_stale_socket(path: str) -> None:
    """Removes a socket that a killed process has left. Raises Rejected if somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise Rejected("listen", f"cannot listen on unix:{path}: {error}") from None
        else:
            raise Rejected("listen", f"cannot listen on unix:{path}: another process does")


def _handler(method: MethodDescriptor, implementation: object) -> Any:
    call = getattr(implementation, method.name)
    kind = "stream" if method.client_streaming else "unary"
    streams = method.server_streaming and not inspect.isasyncgenfunction(call)  # it writes to the context itself
    answer = "stream" if method.server_streaming else "unary"
    wrap = _writing if streams else _streaming if method.server_streaming else _unary
    # requests are parsed by us: a message that is none would be an internal error of the library's
    read = _read_stream if method.client_streaming else read_message
    request = GetMessageClass(method.input_type)
    return getattr(grpc, f"{kind}_{answer}_rpc_method_handler")(
        wrap(call, method.full_name, lambda data: read(request, data)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


async def _read_stream(kind: type[Message], stream: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in stream:
        yield read_message(kind, data)


def _unary(call: Any, name: str, read: Callable[[Any], Any]) -> Any:
    @functools.wraps(call)
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await call(read(request), context)
        except Exception as error:
            await _abort(context, error, name)

    return handle


def _streaming(call: Any, name: str, read: Callable[[Any], Any]) -> Any:
    @functools.wraps(call)
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for message in call(read(request), context):
                yield message
        except Exception as error:
            await _abort(context, error, name)

    return handle


def _writing(call: Any, name: str, read: Callable[[Any], Any]) -> Any:
    @functools.wraps(call)
    async def handle(request: Any, context: Any) -> None:
        writes = Writes(context)
        try:
            await call(read(request), writes)
        except Exception as error:
            await writes.settled()
            await _abort(context, error, name)
        else:
            await writes.settled()

    return handle


class Writes:
    """The context of a handler that writes its answers itself, in a task that may be cancelled.

    gRPC never ends a call whose handler is over while a cancelled write is still under way: its client would wait for
    ever. So a write goes on when its task does not, and is waited for before the call ends."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._write: asyncio.Future[None] | None = None

    async def write(self, message: Message) -> None:
        """Raises PeerLost if nobody can read it: the client is gone, or this server is stopped."""
        self._write = asyncio.ensure_future(self._context.write(message))
        self._write.add_done_callback(_take_failure)
        try:
            await asyncio.shield(self._write)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as error:
            raise PeerLost(f"the client has gone: {error}") from None

    def time_remaining(self) -> float | None:
        remaining_s: float | None = self._context.time_remaining()
        return remaining_s

    async def settled(self) -> None:
        """Returns when no write is under way, or a client that reads nothing has had its time."""
        if self._write is not None:
            await asyncio.wait([self._write], timeout=WRITE_LIMIT_S)


def _take_failure(write: asyncio.Future[None]) -> None:
    """A write whose task was cancelled may fail when nobody waits for it any more: that is no news then."""
    if not write.cancelled():
        write.exception()


async def _abort(context: Any, error: Exception, name: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code, details = answer_of(error, name)
    await context.abort(code, details, trailing_metadata_of(error))
