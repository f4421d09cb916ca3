"""Our errors as gRPC statuses, and back."""

from __future__ import annotations

import logging
from typing import Final

import grpc

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
    Unreachable,
    Unsupported,
)
from stagemesh.shared.obs.log import Log

log = Log(logging.getLogger(__name__))

MAX_DETAILS_BYTES: Final = 2000  # with all escapes below the 8 KiB of trailers beyond which a client gets none of it
BROKEN_WRITE: Final = "Internal error from Core"  # what the library says where a connection breaks under a write
RETRY_AFTER: Final = "retry-after-s"
ANSWERED: Final = "stagemesh-answered"  # in the trailing metadata of every status that a server of ours sends itself

_CODES: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (Rejected, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Retryable, grpc.StatusCode.UNAVAILABLE),
    (PeerLost, grpc.StatusCode.UNAVAILABLE),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (ProtocolViolation, grpc.StatusCode.FAILED_PRECONDITION),
    (Unsupported, grpc.StatusCode.FAILED_PRECONDITION),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
)

_FLAWS: Final = (
    ("CERTIFICATE_VERIFY_FAILED", ""),
    ("Hostname Verification Check failed", "its certificate is not for that name"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("Tls handshake failed", ""),
    ("Socket closed", "it closes it at once; it may want TLS, or a certificate that it trusts"),
)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status that a server answers for `error`, or for the first of ours in a group. What is not ours is a bug."""
    error = first_of_ours(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


def answer_of(error: Exception, rpc: str) -> tuple[grpc.StatusCode, str]:
    """The same, short enough for a client to get it; a bug is logged."""
    error = first_of_ours(error)
    code, details = status_of(error)
    if isinstance(error, Bug) or not isinstance(error, StagemeshError | TimeoutError):
        log.error("a handler failed", error=error, rpc=rpc)
    return code, _shortened(details)


def trailing_metadata_of(error: Exception) -> tuple[tuple[str, str], ...]:
    """What a server sends with the status of `error`: that it is an answer, and when it makes sense to come back."""
    answered = ((ANSWERED, "1"),)
    after_s = retry_after_s_of(error)
    return answered if after_s is None else (*answered, (RETRY_AFTER, f"{after_s:g}"))


def retry_after_s_of(error: Exception) -> float | None:
    """When it makes sense to come back, if `error` says so."""
    error = first_of_ours(error)
    return error.retry_after_s if isinstance(error, Exhausted) else None


def first_of_ours(error: Exception) -> Exception:
    """The first StagemeshError in a group of errors, else the error itself."""
    if isinstance(error, ExceptionGroup):
        known = (found for each in error.exceptions if isinstance(found := first_of_ours(each), StagemeshError))
        return next(known, error)
    return error


def from_rpc(error: grpc.aio.AioRpcError, peer: str) -> StagemeshError:
    """The error that a client raises for a call to `peer` that ended with a status."""
    has_answered = any(key == ANSWERED for key, _ in error.trailing_metadata() or ())
    return from_status(
        error.code(), error.details() or "", peer, has_answered=has_answered, retry_after_s=_retry_after_s(error)
    )


def from_status(
    code: grpc.StatusCode, details: str, peer: str, *, has_answered: bool, retry_after_s: float | None = None
) -> StagemeshError:
    """The error that a status of `peer` stands for. `has_answered`: it is a server's word, not the library's about a
    connection."""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, _, message = details.partition(": ")
            return Rejected(field, message) if message else Rejected("request", details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Exhausted(details, retry_after_s=retry_after_s)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(f"{peer}: {details}")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
            if (flaw := _handshake_flaw(details)) is not None:
                return Unreachable(f"no connection to {peer}: {flaw}")
            if "failed to connect" in details:  # the rest of it is for the library's authors
                return Unreachable(f"nothing answers at {peer}")
            if details == "Deadline Exceeded":
                return Unreachable(f"{peer}: no answer in time (Deadline Exceeded)")
            kind = Retryable if has_answered else Unreachable
            return kind(f"{peer}: {details or code.name}")
        case grpc.StatusCode.CANCELLED if not (has_answered or "Locally cancelled" in details):
            return Unreachable(f"{peer}: {details or code.name}")  # the server was stopped under the call
        case grpc.StatusCode.CANCELLED:
            return Cancelled(f"{peer}: {details or code.name}")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ProtocolViolation(f"{peer}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return Unsupported(f"{peer}: {details}")
        case grpc.StatusCode.INTERNAL if details.startswith(BROKEN_WRITE) and not has_answered:
            return Unreachable(f"{peer}: the connection has broken")
        case _:
            return Bug(f"{peer}: {code.name}: {details}")


def _handshake_flaw(details: str) -> str | None:
    """Why TLS has failed, if that is what the library says: in a word for each kind. A server that does not take our
    certificate, or wants TLS where there is none, only closes the connection."""
    if "failed to connect" not in details:
        return None
    for said, meant in _FLAWS:
        if (at := details.find(said)) >= 0:
            return meant or details[at:].removesuffix(": OK")
    return None


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    try:
        return next((float(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER), None)
    except ValueError:  # whoever says so is not one of ours
        return None


def _shortened(details: str) -> str:
    data = details.encode(errors="replace")
    if len(data) <= MAX_DETAILS_BYTES:
        return data.decode()
    return f"{data[:MAX_DETAILS_BYTES].decode(errors='ignore')}... ({len(data)} bytes)"
