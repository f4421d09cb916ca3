"""A GGUF file as parts that can be replaced and put together again, right or wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _text(text: str) -> bytes:
    data = text.encode(errors="replace")
    return struct.pack("<Q", len(data)) + data


@dataclass(frozen=True, slots=True)
class Value:
    """Of a metadata key: its type, and its bytes as they stand in the file."""

    kind: int
    data: bytes

    @classmethod
    def text(cls, text: str) -> Value:
        return cls(STRING, _text(text))

    @classmethod
    def number(cls, kind: int, number: int) -> Value:
        return cls(kind, struct.pack("<I", number))

    @classmethod
    def texts(cls, texts: Sequence[str]) -> Value:
        return cls(ARRAY, struct.pack("<IQ", STRING, len(texts)) + b"".join(map(_text, texts)))

    @classmethod
    def numbers(cls, kind: int, numbers: Sequence[int]) -> Value:
        return cls(ARRAY, struct.pack(f"<IQ{len(numbers)}i", kind, len(numbers), *numbers))

    @classmethod
    def numbers_said_to_be(cls, count: int) -> Value:
        """None are there."""
        return cls(ARRAY, struct.pack("<IQ", INT32, count))

    @classmethod
    def floats(cls, numbers: Sequence[float]) -> Value:
        return cls(ARRAY, struct.pack(f"<IQ{len(numbers)}f", FLOAT32, len(numbers), *numbers))

    @classmethod
    def nested(cls, depth: int) -> Value:
        return cls(ARRAY, struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", INT32, 0))


@dataclass(slots=True)
class GgufParts:
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # shape (fastest first), kind, offset
    data: bytes = b""
    header_bytes: int = 0

    def copy(self) -> GgufParts:
        tensors = {name: dict(entry) for name, entry in self.tensors.items()}
        return GgufParts(dict(self.metadata), tensors, self.data, self.header_bytes)

    def to_bytes(self, *, alignment: int) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        head += b"".join(_text(key) + struct.pack("<I", v.kind) + v.data for key, v in self.metadata.items())
        for name, entry in self.tensors.items():
            shape = entry["shape"]
            head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            head += struct.pack("<IQ", entry["kind"], entry["offset"])
        return head + bytes(-len(head) % alignment) + self.data


def parse_parts(data: bytes) -> GgufParts:
    """Of a file that is right."""
    parts, at = GgufParts(), 24
    _, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
    for _ in range(num_keys):
        key, at = _read_text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        end = _value_end(data, at + 4, kind)
        parts.metadata[key], at = Value(kind, data[at + 4 : end]), end
    for _ in range(num_tensors):
        name, at = _read_text(data, at)
        (rank,) = struct.unpack_from("<I", data, at)
        shape = list(struct.unpack_from(f"<{rank}Q", data, at + 4))
        kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * rank)
        parts.tensors[name] = {"shape": shape, "kind": kind, "offset": offset}
        at += 4 + 8 * rank + 12
    parts.header_bytes = at
    parts.data = data[at + -at % 32 :]
    return parts


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _value_end(data: bytes, at: int, kind: int) -> int:
    if kind == STRING:
        return _read_text(data, at)[1]
    if kind != ARRAY:
        return at + _SIZES[kind]
    element, count = (int(number) for number in struct.unpack_from("<IQ", data, at))
    at += 12
    if element != STRING:
        return at + _SIZES[element] * count
    for _ in range(count):
        at = _read_text(data, at)[1]
    return at
