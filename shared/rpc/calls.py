"""Unary calls over a stream that stays open: a message on it is less than half as long on its way as a call of its own,
which needs a stream to be made and ended. For calls that a GPU waits for.

caller --Call--> stream --> the method's handler --CallReply--> caller
                    `--it ends--> every caller that waits may try again, and the next call opens another stream

Errors are those of a unary call. A caller that gives up is not told to the handler, which has the same deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagemesh.shared.errors import PeerLost, ProtocolViolation, StagemeshError, Unreachable
from stagemesh.shared.pb import calls_pb2
from stagemesh.shared.rpc.duplex import Duplex
from stagemesh.shared.rpc.errors import answer_of, first_of_ours, from_status, retry_after_s_of
from stagemesh.shared.rpc.messages import read_message

CALLS: Final = calls_pb2.DESCRIPTOR.services_by_name["Calls"]
MOST_AT_ONCE: Final = 1024
"""Handlers of one stream; what comes then waits in the connection."""
LONGEST_S: Final = 3600.0
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def quick_methods(services: Mapping[ServiceDescriptor, object]) -> dict[str, tuple[MethodDescriptor, Any]]:
    """The unary methods, with their handlers, that an implementation names in QUICK."""
    found = {}
    for service, implementation in services.items():
        for method in service.methods:
            if method.name in getattr(type(implementation), "QUICK", ()):
                found[method.name] = (method, getattr(implementation, method.name))
    return found


class CallService:
    """The Calls service of a server, for `methods` alone."""

    def __init__(self, methods: Mapping[str, tuple[MethodDescriptor, Any]]) -> None:
        self._methods = methods

    async def CallStream(self, calls: Any, context: Any) -> None:  # noqa: N802
        writing, room = asyncio.Lock(), asyncio.Semaphore(MOST_AT_ONCE)

        async def answer(call: calls_pb2.Call) -> None:
            reply = await self._reply(call, context)
            async with writing:
                await context.write(reply)
            room.release()

        async with asyncio.TaskGroup() as group:
            async for call in calls:
                await room.acquire()
                group.create_task(answer(call))

    async def _reply(self, call: calls_pb2.Call, context: Any) -> calls_pb2.CallReply:
        name = call.method
        try:
            if (known := self._methods.get(name)) is None:
                raise ProtocolViolation(f"{name!r} is not called over a stream")
            method, handler = known
            name = method.full_name
            if not 0.0 < call.timeout_s <= LONGEST_S:
                raise ProtocolViolation(f"timeout_s must be above 0 and at most {LONGEST_S:g}, got {call.timeout_s}")
            async with asyncio.timeout(call.timeout_s):
                said = await handler(read_message(GetMessageClass(method.input_type), call.request), context)
        except Exception as error:
            code, details = answer_of(error, name)
            after_s = retry_after_s_of(error)
            return calls_pb2.CallReply(number=call.number, code=code.value[0], details=details, retry_after_s=after_s)
        return calls_pb2.CallReply(number=call.number, reply=said.SerializeToString())


class QuickCalls:
    """Calls of `methods` of one peer. The first one opens the stream, and after its end the next."""

    def __init__(self, peer: str, methods: Iterable[MethodDescriptor], open_stream: Callable[[], Duplex]) -> None:
        self._peer, self._open = peer, open_stream
        self._replies = {method.name: GetMessageClass(method.output_type) for method in methods}
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[calls_pb2.CallReply]] = {}
        self._unsent: deque[calls_pb2.Call] = deque()
        self._more = asyncio.Event()
        self._stream: asyncio.Task[None] | None = None

    async def call(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """The answer. Raises what `Client.call` raises."""
        if self._stream is None or self._stream.done():
            self._stream = asyncio.create_task(self._run(self._open()))
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._unsent.append(
            calls_pb2.Call(number=number, method=method, request=request.SerializeToString(), timeout_s=timeout_s)
        )
        self._more.set()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            raise Unreachable(f"{self._peer}: no answer in time") from None
        finally:
            del self._waiting[number]
        if reply.code:
            code = _CODES.get(reply.code, grpc.StatusCode.UNKNOWN)
            after_s = reply.retry_after_s if reply.HasField("retry_after_s") else None
            raise from_status(code, reply.details, self._peer, has_answered=True, retry_after_s=after_s)
        return self._replies[method].FromString(reply.reply)

    async def _run(self, stream: Duplex) -> None:
        """To its end."""
        why: StagemeshError = PeerLost(f"{self._peer}: the channel was closed")
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(stream))
                async for reply in stream.receive():
                    self._answered(reply)
                sending.cancel()
                why = Unreachable(f"{self._peer} has ended the stream")
        except* StagemeshError as errors:
            why = _found(errors)
        finally:
            stream.cancel()
            self._fail(why)

    async def _send(self, stream: Duplex) -> None:
        while True:
            self._more.clear()
            while self._unsent:
                call = self._unsent.popleft()
                if call.number in self._waiting:  # else its caller has given up
                    await stream.send(call)
            await self._more.wait()

    def _answered(self, reply: calls_pb2.CallReply) -> None:
        answer = self._waiting.get(reply.number)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _fail(self, why: StagemeshError) -> None:
        self._unsent.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(why)

    async def close(self) -> None:
        """Who waits gets PeerLost."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait([self._stream])


def _found(errors: ExceptionGroup[StagemeshError]) -> StagemeshError:
    error = first_of_ours(errors)
    assert isinstance(error, StagemeshError)
    return error
