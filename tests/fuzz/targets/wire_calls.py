"""Bytes to any method of a server, and what its answers may be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.pb import calls_pb2
from tests.fuzz.mutate import mutate_bytes

CALL_LIMIT_S: Final = 5.0
MAX_RESPONSES: Final = 4
CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


WROTE_TOO_LATE = "Internal error from Core"
"""What the client's own library says, for whatever reason, when it writes to a stream that the server has ended."""


class Refused(StagemeshError):
    """The server has said so, with one of CODES and a reason."""


class Wrong(AssertionError):
    """The server has failed."""


def check_status(name: str, error: grpc.aio.AioRpcError) -> None:
    """Raises Refused, or Wrong."""
    if error.details() == WROTE_TOO_LATE:
        raise Refused(WROTE_TOO_LATE)
    if error.code() in CODES and error.details():
        raise Refused(f"{error.code().name}: {error.details()}")
    raise Wrong(f"{name}: {error.code().name}: {error.details()}")


def check_reply(reply: calls_pb2.CallReply) -> None:
    """Raises Refused, or Wrong."""
    code = next(code for code in grpc.StatusCode if code.value[0] == reply.code)
    if code in CODES and reply.details:
        raise Refused(f"{code.name}: {reply.details}")
    raise Wrong(f"a call over a stream: {code.name}: {reply.details}")


class Caller:
    """Sends bytes to any method of a server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __call__(self, method: MethodDescriptor, messages: list[bytes]) -> list[Any]:
        """The answers, a few at most."""
        kind = f"{_side(method.client_streaming)}_{_side(method.server_streaming)}"
        name = f"/{method.containing_service.full_name}/{method.name}"
        answer = GetMessageClass(method.output_type).FromString
        make = getattr(self._channel, kind)(name, request_serializer=bytes, response_deserializer=answer)
        call = make(_stream(messages) if method.client_streaming else messages[0], timeout=CALL_LIMIT_S)
        try:
            if not method.server_streaming:
                return [await call]
            answers = []
            async for response in call:
                answers.append(response)
                if len(answers) >= (1 if method.name == "Watch" else MAX_RESPONSES):  # which has no end
                    break
            return answers
        except grpc.aio.AioRpcError as error:
            check_status(method.name, error)
            raise
        finally:
            call.cancel()


def _side(streaming: bool) -> str:
    return "stream" if streaming else "unary"


async def _stream(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


Send = Callable[[Random], Coroutine[Any, Any, None]]


def bytes_of(rng: Random, message: Message) -> bytes:
    data = message.SerializeToString()
    return mutate_bytes(rng, data) if rng.random() < 0.3 else data
