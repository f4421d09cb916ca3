"""A GGUF file: its metadata, and its tensors where they lie.

magic, version, counts -> metadata (key, type, value)* -> tensors (name, shape, type, offset)* -> padding -> data

The header is parsed here and not by `gguf.GGUFReader`, which takes seconds for the 98,000 strings of a tokenizer:
arrays of strings stay bytes until somebody asks. Only the dequantization is that library's.
Layout: the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import shown

SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT: Final = 32  # bytes
MAX_ALIGNMENT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` in torch's order (slowest first); `kind` is GGML's number; `offset` counts from the data section."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Strings:
    """An array of strings that nobody has decoded yet."""

    start: int
    count: int


class GgufFile:
    """Open for the life of the object; the data is mapped, not read. Raises Rejected for what is no GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise Rejected("model", f"{path}: cannot be read ({error})") from error
        self._at = 0
        try:
            self._metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, IndexError, RecursionError) as error:
            raise Rejected("model", f"{path}: the header is truncated or damaged at byte {self._at}") from error
        alignment = self.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise Rejected("model", f"{path}: general.alignment must be in 1..{MAX_ALIGNMENT}, got {shown(alignment)}")
        self.header_bytes = self._at
        self.data_start = -(-self._at // alignment) * alignment

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`: a scalar, a str, or a list; `default` if the file has none. Raises Rejected for an array
        of strings that are none."""
        value = self._metadata.get(key, default)
        if not isinstance(value, _Strings):
            return value
        try:
            return list(self._decode(value))
        except UnicodeDecodeError as error:
            raise Rejected("model", f"{self.path}: {key}: must be UTF-8 ({error})") from error

    def tensor_bytes(self, info: TensorInfo, count: int) -> memoryview:
        """The first `count` bytes of a tensor, in place. Raises Rejected where the file ends before."""
        start = self.data_start + info.offset
        if start + count > len(self.data):
            raise Rejected(
                "model",
                f"{self.path}: tensor {info.name} is truncated: it ends at byte {start + count}, "
                f"the file at {len(self.data)}",
            )
        return memoryview(self.data)[start : start + count]

    def plain(self) -> dict[str, Any]:
        """All metadata except arrays of strings."""
        return {key: value for key, value in self._metadata.items() if not isinstance(value, _Strings)}

    def _parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.data[:4] != b"GGUF":
            raise Rejected("model", f"{self.path}: is not a GGUF file")
        self._at = 4
        version, num_tensors, num_keys = self._take("<IQQ")
        if version not in (2, 3):
            raise Rejected("model", f"{self.path}: GGUF version {version} is not supported, only 2 and 3")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._take("<I")[0])
        return metadata, {info.name: info for info in (self._tensor() for _ in range(num_tensors))}

    def _tensor(self) -> TensorInfo:
        name = self._string()
        (rank,) = self._take("<I")
        shape = self._take(f"<{rank}Q")
        kind, offset = self._take("<IQ")
        return TensorInfo(name, tuple(reversed(shape)), kind, offset)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take("<" + SCALARS[kind])[0]
        element, count = self._take("<IQ")
        if element == STRING:
            return self._skip_strings(count)
        if element == ARRAY:
            return [self._value(ARRAY) for _ in range(count)]
        return list(self._take(f"<{count}{SCALARS[element]}"))

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        return bytes(self._take(f"<{length}s")[0]).decode()

    def _skip_strings(self, count: int) -> _Strings:
        strings = _Strings(self._at, count)
        at, data, length = self._at, self.data, struct.Struct("<Q")
        for _ in range(count):
            at += 8 + length.unpack_from(data, at)[0]
        self._at = at
        return strings

    def _decode(self, strings: _Strings) -> Iterator[str]:
        at, data, length = strings.start, self.data, struct.Struct("<Q")
        for _ in range(strings.count):
            end = at + 8 + length.unpack_from(data, at)[0]
            yield data[at + 8 : end].decode()
            at = end
