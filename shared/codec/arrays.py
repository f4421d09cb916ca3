"""int64 arrays as bytes, little endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from stagemesh.shared.core.commands import Ints
from stagemesh.shared.errors import ProtocolViolation

_WIRE = np.dtype("<i8")


def to_bytes(values: Sequence[int] | Ints) -> bytes:
    return np.asarray(values, dtype=_WIRE).tobytes()


def to_array(data: bytes) -> Ints:
    """A read-only array. Raises ProtocolViolation if the length is no multiple of eight."""
    if len(data) % 8:
        raise ProtocolViolation(f"an int64 array of {len(data)} bytes")
    return np.frombuffer(data, dtype=_WIRE)


def to_tuple(data: bytes) -> tuple[int, ...]:
    """The same, as ints: short ones are many."""
    if len(data) % 8:
        raise ProtocolViolation(f"an int64 array of {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 8}q", data)


def floats_to_bytes(values: Sequence[float]) -> bytes:
    """float64, little endian."""
    return struct.pack(f"<{len(values)}d", *values)


def bytes_to_floats(data: bytes) -> tuple[float, ...]:
    """Raises ProtocolViolation if the length is no multiple of eight."""
    if len(data) % 8:
        raise ProtocolViolation(f"a float64 array of {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 8}d", data)
