"""The one error root and its children, which say what the caller can do. Foreign exceptions are mapped once, in the
adapter that meets them."""

from __future__ import annotations


class StagemeshError(Exception):
    """Root of every error this project raises on purpose."""


class Rejected(StagemeshError):
    """The request or the setting is wrong and stays wrong. Names the `field` and the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unauthenticated(StagemeshError):
    """The caller has not shown who it is. It may call again with what it lacks; what it sent is not quoted."""


class Exhausted(StagemeshError):
    """No capacity now; nothing was started. The caller may come back later: after `retry_after_s`, if that is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Retryable(StagemeshError):
    """It failed without lasting effect; the same call may succeed later."""


class Unreachable(Retryable):
    """Nobody has answered: the peer is away, or too slow. Whether the call had an effect is not known."""


class Cancelled(StagemeshError):
    """The caller, its deadline or an abort ended the request."""


class PeerLost(StagemeshError):
    """A process that this one depends on is gone."""


class ProtocolViolation(StagemeshError):
    """A peer sent what the protocol does not allow here. The connection is not to be trusted further."""


class Unsupported(StagemeshError):
    """The peer does not know the call: it is of another version, or nobody of ours."""


class Bug(StagemeshError):
    """An invariant of ours does not hold."""
