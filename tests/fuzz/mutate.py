"""Wrong inputs made of right ones: bytes, JSON values, messages."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS: Final = (
    *(-1, 0, 1, 2, 7, 64, 127, 255, 65_535),
    *((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64),
)
FLOATS: Final = (0.0, -0.0, -1.5, 1e-320, 0.5, 1.0, 1e30, 1e308, math.inf, -math.inf, math.nan)
TEXTS: Final = (
    *("", " ", "a", "0", "\0", "\n", "é", "\U0001f30a", "\u2028"),
    *("/dev/zero", "../x", "..", "%s", "{}", "nan", "<s>"),
)
LONG: Final = 3000


def junk_text(rng: Random) -> str:
    match rng.randrange(4):
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return rng.choice(TEXTS) * rng.randrange(LONG)
        case 2:
            return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800), 0x10FFFF))) for _ in range(8))
        case _:
            return "".join(rng.choices("abc XYZ_-.:/019", k=rng.randrange(40)))


def junk(rng: Random, depth: int = 0) -> Any:
    """Any JSON value, and numbers that JSON has no word for."""
    match rng.randrange(9 if depth < 3 else 6):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice(INTEGERS) * rng.choice((1, -1))
        case 3:
            return rng.choice(FLOATS)
        case 4 | 5:
            return junk_text(rng)
        case 6:
            return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 7:
            return {junk_text(rng)[:50]: junk(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            return nested(rng.choice((10, 200)) if rng.random() < 0.1 else 3)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """A few flips, cuts, doublings and insertions."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + rng.randrange(1, 20)]
            case 4:
                changed[at:at] = changed[at : at + rng.randrange(1, 200)]
            case _:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
    return bytes(changed)


def mutate_json(rng: Random, value: Any) -> Any:
    """Some values in it are others, are away, or are there twice."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        value = _mutate_one(rng, value)
    return value


def _mutate_one(rng: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.1:
            del changed[key]
        elif rng.random() < 0.1:
            changed[junk_text(rng)[:50]] = junk(rng)
        else:
            changed[key] = _mutate_one(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        changed_list = list(value)
        match rng.randrange(4):
            case 0:
                del changed_list[at]
            case 1:
                changed_list.insert(at, value[rng.randrange(len(value))])
            case _:
                changed_list[at] = _mutate_one(rng, value[at])
        return changed_list
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice((-1, 1, 1000))
    return junk(rng)


def json_bytes(rng: Random, value: Any) -> bytes:
    """The value as a file: mutated before, after, or nested without end."""
    match rng.randrange(10):
        case 0:
            return mutate_bytes(rng, json.dumps(value).encode())
        case 1 if rng.random() < 0.1:
            return rng.choice((b"[", b'{"a":', b'[{"a":')) * rng.choice((10, 2000, 200_000))
        case 2 if rng.random() < 0.3:
            return rng.randbytes(rng.randrange(50))
        case _:
            return json.dumps(mutate_json(rng, value)).encode()


def fill(rng: Random, message: Message, depth: int = 0) -> Message:
    """Sets some fields of a message to values of their types, the limits among them."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5 or depth > 3:
            continue
        if field.is_repeated:
            _fill_repeated(rng, message, field, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            part = getattr(message, field.name)
            part.SetInParent()
            fill(rng, part, depth + 1)
        else:
            setattr(message, field.name, scalar(rng, field))
    return message


def _fill_repeated(rng: Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    into, count = getattr(message, field.name), rng.choice((0, 1, 2, 5))
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        for _ in range(count):
            key = scalar(rng, field.message_type.fields_by_name["key"])
            if value.type == FieldDescriptor.TYPE_MESSAGE:
                fill(rng, into[key], depth + 1)
            else:
                into[key] = scalar(rng, value)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        for _ in range(count):
            fill(rng, into.add(), depth + 1)
    else:
        into.extend(scalar(rng, field) for _ in range(count))


def scalar(rng: Random, field: FieldDescriptor) -> Any:
    """A value that the field's type has."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 7, 8, 16, 48, 96)))
        return junk_text(rng)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((*(value.number for value in field.enum_type.values), 99, -1))
    bits = 64 if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    signed = kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_INT32)
    lowest, highest = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    value = rng.choice(INTEGERS) * rng.choice((1, 1, -1))
    return min(max(value, lowest), highest)
