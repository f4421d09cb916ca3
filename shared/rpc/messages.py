"""Messages from bytes that may be none."""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from stagemesh.shared.errors import Rejected


def read_message(kind: type[Message], data: bytes) -> Message:
    """Raises Rejected for bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Rejected("message", f"is no {kind.DESCRIPTOR.name}: {error}") from None
