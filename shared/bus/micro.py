"""Commands over NATS's micro protocol, on both sides: any NATS client lists them ($SRV.INFO) and calls them with JSON.

An error is what the protocol says: `Nats-Service-Error` and `Nats-Service-Error-Code` in the headers of the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER, Request, ServiceError

from stagemesh.shared.bus.nats import NatsBus
from stagemesh.shared.errors import (
    Bug,
    Cancelled,
    Exhausted,
    PeerLost,
    ProtocolViolation,
    Rejected,
    Retryable,
    StagemeshError,
    Unauthenticated,
    Unsupported,
)
from stagemesh.shared.obs.log import Log

SERVICE: Final = "stagemesh"
_CODES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (Rejected, 400),
    (Unauthenticated, 401),
    (Cancelled, 409),
    (ProtocolViolation, 412),
    (Exhausted, 429),
    (Unsupported, 501),
    (Retryable, 503),
    (PeerLost, 503),
    (TimeoutError, 504),
)
_NO_RESPONDERS: Final = "503"
_FOREIGN = (nats.errors.Error, OSError)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`answer` gets and gives JSON. It raises StagemeshError for what the caller is to know; any other exception is a
    bug of ours. `metadata` is what discovery tells."""

    name: str
    metadata: Mapping[str, str]
    answer: Callable[[bytes], Awaitable[bytes]]


def admin_subject(mesh: str, command: str) -> str:
    """Where a command is called: what a user of NATS may call is said by subject."""
    return f"stagemesh.{mesh}.admin.{command}"


@asynccontextmanager
async def serve_endpoints(
    bus: NatsBus, *, mesh: str, version: str, endpoints: Sequence[Endpoint], log: Log
) -> AsyncIterator[None]:
    """Serves them while the block runs, again after a time without a server. Raises Retryable without one at first."""
    try:
        service = await nats.micro.add_service(
            bus.client,
            name=SERVICE,
            version=version,
            description=f"Commands of operators for the mesh {mesh!r}: JSON in and out.",
            metadata={"mesh": mesh},
        )
        group = service.add_group(name=admin_subject(mesh, "").rstrip("."))
        for endpoint in endpoints:
            await group.add_endpoint(
                name=endpoint.name.replace(".", "-"),  # a name in the protocol has no dots
                subject=endpoint.name,
                metadata=dict(endpoint.metadata),
                handler=_handler(endpoint, log),
            )
        await _settle(bus.client)
    except _FOREIGN as error:
        raise Retryable(f"cannot serve commands: {error!r}") from error
    try:
        yield
    finally:
        try:
            await service.stop()
        except _FOREIGN as error:  # the server is away: nothing is left there to be stopped
            log.debug("the commands end without a word", error=repr(error))


def _handler(endpoint: Endpoint, log: Log) -> Callable[[Request], Awaitable[None]]:
    async def handle(request: Request) -> None:
        try:
            await _respond(request, await endpoint.answer(request.data))
        except (StagemeshError, TimeoutError) as error:
            log.info("a command is refused", command=endpoint.name, error=str(error))
            raise _told(error) from None
        except Exception as error:
            log.error("a command has failed", command=endpoint.name, error=error)
            raise _told(error) from None

    return handle


def error_of(error: Exception) -> tuple[int, str]:
    """The code and the text that a caller gets."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error) or "no answer in time"
    return 500, f"{type(error).__name__}: {error}"


async def _respond(request: Request, data: bytes) -> None:
    try:
        await request.respond(data)
    except ValueError:
        pass  # nobody asks for the answer
    except nats.errors.MaxPayloadError as error:
        raise Exhausted(f"the answer has {len(data)} bytes, over the server's limit: ask for less") from error


def _told(error: Exception) -> ServiceError:
    """The library answers with it, and counts it in its STATS."""
    code, text = error_of(error)
    return ServiceError(str(code), " ".join(text.split()))  # a header is one line


async def call_endpoint(bus: NatsBus, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
    """The answer. Raises what the other side has raised, Unauthenticated where the server does not let this user call,
    Retryable if nobody serves it, or nobody answers in time."""
    client, refused = bus.client, bus.stats.num_refused
    try:
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox, max_msgs=1)
        await client.publish(subject, payload, reply=inbox)
        await _settle(client)  # a refusal comes before the answer to a ping
        if bus.stats.num_refused > refused:
            raise Unauthenticated(f"this user of NATS may not call {subject}")
        message = await answers.next_msg(timeout=timeout_s)
    except nats.errors.TimeoutError:
        raise Retryable(f"no answer to {subject} within {timeout_s:g} s") from None
    except _FOREIGN as error:
        raise Retryable(f"cannot call {subject}: {error!r}") from error
    headers = message.headers or {}
    if headers.get("Status") == _NO_RESPONDERS:
        raise Retryable(f"nobody serves {subject}: the broker of that mesh is away")
    if (code := headers.get(ERROR_CODE_HEADER)) is not None:
        raise _raised(code, headers.get(ERROR_HEADER, ""))
    return message.data


async def _settle(client: Client) -> None:
    """Returns when the server has taken all that was said to it. A first answer may be left from connecting."""
    for _ in range(2):
        await client.flush()


def _raised(code: str, text: str) -> StagemeshError:
    kind = next((kind for kind, number in _CODES if str(number) == code), Bug)
    if kind is Rejected:
        field, _, rest = text.partition(": ")
        return Rejected(field, rest) if rest else Rejected("request", text)
    error = (Retryable if kind is TimeoutError else kind)(text)
    assert isinstance(error, StagemeshError)
    return error
