"""Unary calls over a stream that stays open: a message on it is less than half as long on its way as a call of its own,
which needs a stream to be made and ended. For calls that a GPU waits for.

caller --Call--> stream --> the method's handler --CallReply--> caller
                    `--it ends--> every caller that waits may try again, and the next call opens another stream

Errors are those of a unary call. A caller that gives up is not told to the handler, whose deadline is as long as the
caller's, from when the call has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from itertools import count
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagemesh.shared.errors import PeerLost, ProtocolViolation, Retryable, StagemeshError, Unreachable, Unsupported
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
            try:
                reply = await self._reply(call, context)
                async with writing:
                    await context.write(reply)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            async for call in calls:
                await room.acquire()
                group.create_task(answer(call))

    async def _reply(self, call: calls_pb2.Call, context: Any) -> calls_pb2.CallReply:
        name = call.method
        try:
            if (known := self._methods.get(name)) is None:
                raise Unsupported(f"{name!r} is not called over a stream")
            method, handler = known
            name = method.full_name
            if not 0.0 < call.timeout_s <= LONGEST_S:
                raise ProtocolViolation(f"timeout_s must be above 0 and at most {LONGEST_S:g}, got {call.timeout_s}")
            async with asyncio.timeout(call.timeout_s):
                said = await handler(read_message(GetMessageClass(method.input_type), call.request), context)
            return calls_pb2.CallReply(number=call.number, reply=said.SerializeToString())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _failure(call, Retryable(f"{name}: its handler was cancelled"), name)
        except Exception as error:
            return _failure(call, error, name)


def _failure(call: calls_pb2.Call, error: Exception, name: str) -> calls_pb2.CallReply:
    code, details = answer_of(error, name)
    if isinstance(error, Unsupported):
        code = grpc.StatusCode.UNIMPLEMENTED  # the caller makes a call of its own then
    after_s = retry_after_s_of(error)
    return calls_pb2.CallReply(number=call.number, code=code.value[0], details=details, retry_after_s=after_s)


class QuickCalls:
    """Calls of `methods` of one peer. The first one opens a stream with `open_stream`; so does the next one after its
    end, or when what connections are made with, `made_with`, is another: then the old one ends with its last answer."""

    def __init__(
        self,
        peer: str,
        methods: Iterable[MethodDescriptor],
        open_stream: Callable[[], Duplex],
        made_with: Callable[[], object],
    ) -> None:
        self._peer, self._open, self._made_with = peer, open_stream, made_with
        self._replies = {method.name: GetMessageClass(method.output_type) for method in methods}
        self._stream: _Stream | None = None
        self._retired: set[_Stream] = set()

    async def call(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """The answer. Raises what `Client.call` raises."""
        reply = await self._current().ask(method, request.SerializeToString(), timeout_s)
        if reply.code:
            code = _CODES.get(reply.code, grpc.StatusCode.UNKNOWN)
            after_s = reply.retry_after_s if reply.HasField("retry_after_s") else None
            raise from_status(code, reply.details, self._peer, has_answered=True, retry_after_s=after_s)
        return self._replies[method].FromString(reply.reply)

    def _current(self) -> _Stream:
        self._retired = {stream for stream in self._retired if not stream.over}
        made_with = self._made_with()
        if self._stream is not None and not self._stream.over and self._stream.made_with is not made_with:
            self._stream.retire()
            self._retired.add(self._stream)
            self._stream = None
        if self._stream is None or self._stream.over:
            self._stream = _Stream(self._peer, self._open(), made_with)
        return self._stream

    async def close(self) -> None:
        """Who waits gets PeerLost."""
        for stream in (self._stream, *self._retired):
            if stream is not None:
                await stream.close()


class _Stream:
    """One stream, to its end."""

    def __init__(self, peer: str, duplex: Duplex, made_with: object) -> None:
        self._peer, self._duplex, self.made_with = peer, duplex, made_with
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[calls_pb2.CallReply]] = {}
        self._unsent: dict[int, calls_pb2.Call] = {}
        self._more = asyncio.Event()
        self._retired = False
        self._task = asyncio.create_task(self._run())

    @property
    def over(self) -> bool:
        return self._task.done()

    async def ask(self, method: str, request: bytes, timeout_s: float) -> calls_pb2.CallReply:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._unsent[number] = calls_pb2.Call(number=number, method=method, request=request, timeout_s=timeout_s)
        self._more.set()
        try:
            async with asyncio.timeout(timeout_s):
                reply: calls_pb2.CallReply = await answer
                return reply
        except TimeoutError:
            raise Unreachable(f"{self._peer}: no answer in time") from None
        finally:
            del self._waiting[number]
            self._unsent.pop(number, None)  # given up before it was sent
            self._end_if_retired()

    def retire(self) -> None:
        """It ends when nobody waits for an answer any more."""
        self._retired = True
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self._retired and not self._waiting:
            self._task.cancel()

    async def _run(self) -> None:
        why: StagemeshError = PeerLost(f"{self._peer}: the channel was closed")
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send())
                async for reply in self._duplex.receive():
                    self._answered(reply)
                sending.cancel()
            why = Unreachable(f"{self._peer} has ended the stream")
        except Exception as error:
            why = self._why(error)
        finally:
            self._duplex.cancel()
            self._fail(why)

    def _why(self, error: Exception) -> StagemeshError:
        """That the stream is over is no word on a call, but for what the peer says of all of them."""
        error = first_of_ours(error)
        if isinstance(error, Retryable | ProtocolViolation | Unsupported):
            return error
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return Unreachable(f"{self._peer}: the stream has ended: {error}")

    async def _send(self) -> None:
        while True:
            self._more.clear()
            while self._unsent:
                await self._duplex.send(self._unsent.pop(next(iter(self._unsent))))
            await self._more.wait()

    def _answered(self, reply: calls_pb2.CallReply) -> None:
        answer = self._waiting.get(reply.number)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _fail(self, why: StagemeshError) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(copy(why))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._fail(PeerLost(f"{self._peer}: the channel was closed"))  # if it had not begun
        self._duplex.cancel()
