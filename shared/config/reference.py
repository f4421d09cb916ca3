"""The reference of the config, made from the classes: what `stagemesh config reference` prints. Pure.

Types, ranges and defaults come from msgspec; what a key means comes from the comments beside it, in the source that
every install has.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import msgspec
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StrType,
    UnionType,
    VarTupleType,
)
from msgspec.structs import FieldInfo

from stagemesh.shared.config.sections import Config

TITLE = "# Configuration"
INTRO = """\
Made by `stagemesh config reference` from the classes of the config; do not edit. One TOML file a deployment, the same
for every process of it. Each key but those of `[[instance]]` can be overridden by `STAGEMESH_<SECTION>__<KEY>`. Names
that end in `_s` are seconds."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section. `default` is TOML, empty where there is none; `note` is the comment beside it."""

    name: str
    kind: str
    default: str
    required: bool
    note: str


@dataclass(frozen=True, slots=True)
class Section:
    """`title` is as in the file: `[engine]`, `[[instance]]`."""

    title: str
    text: str
    keys: tuple[Key, ...]


def sections() -> Iterator[Section]:
    """In the order of the classes."""
    for field in msgspec.structs.fields(Config):
        is_list = field.name == "instances"
        struct = field.type.__args__[0] if is_list else field.type
        title = "[[instance]]" if is_list else f"[{field.name}]"
        notes = comments(inspect.getsource(struct))
        keys = tuple(_key(key, notes) for key in msgspec.structs.fields(struct))
        yield Section(title, inspect.cleandoc(struct.__doc__ or ""), keys)


def markdown() -> str:
    """The reference for people."""
    return "\n".join([TITLE, "", INTRO, "", *(line for section in sections() for line in _markdown(section))])


def toml() -> str:
    """A config file with every key commented out at its default."""
    return "\n".join(line for section in sections() for line in _toml(section))


def comments(source: str) -> dict[str, str]:
    """What the comments of a class say, by field: those in the lines above it, and the one behind it."""
    notes: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        code, comment = _split(line)
        if not code.strip():
            above = [*above, comment] if comment else []
            continue
        field = re.match(r"    (\w+): ", code)
        said = [*above, comment] if comment else above
        if field is not None and said:
            notes[field[1]] = " ".join(said)
        above = []
    return notes


def _split(line: str) -> tuple[str, str]:
    """Code and comment of one line. One that is part of a longer string is code."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            if token.type == tokenize.COMMENT:
                before = line.strip()[: token.start[1]]
                return " " * (len(line) - len(line.lstrip())) + before, token.string.removeprefix("#").strip()
    except (tokenize.TokenError, IndentationError):
        pass
    return line, ""


def _key(field: FieldInfo, notes: Mapping[str, str]) -> Key:
    required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    default = "" if required or field.default is None else json.dumps(field.default)
    return Key(field.name, _kind(msgspec.inspect.type_info(field.type)), default, required, notes.get(field.name, ""))


def _kind(type_: Any) -> str:
    match type_:
        case BoolType():
            return "true or false"
        case IntType():
            return f"whole number{_range(type_)}"
        case FloatType():
            return f"number{_range(type_)}"
        case StrType():
            return "text" if type_.pattern is None else f"text like `{type_.pattern}`"
        case LiteralType():
            return " or ".join(f'`"{value}"`' for value in type_.values)
        case VarTupleType():
            return f"list of: {_kind(type_.item_type)}"
        case UnionType():
            return " or ".join(_kind(each) for each in type_.types if not isinstance(each, NoneType))
        case _:
            raise TypeError(f"no words for {type_!r}")


def _range(type_: Any) -> str:
    bounds = (("at least", type_.ge), ("above", type_.gt), ("at most", type_.le))
    return "".join(f", {word} {_number(value)}" for word, value in bounds if value is not None)


def _number(value: float) -> str:
    """Large powers of two, and what is one less, as such."""
    whole = int(value)
    if value != whole or whole < 1 << 16:
        return f"{value:g}"
    power = whole.bit_length()
    return {1 << power - 1: f"2^{power - 1}", (1 << power) - 1: f"2^{power} - 1"}.get(whole, str(whole))


def _markdown(section: Section) -> Iterator[str]:
    yield from (f"## `{section.title}`", "", section.text, "", "| key | type | default | |", "|---|---|---|---|")
    for key in section.keys:
        default = "required" if key.required else f"`{key.default}`" if key.default else "none"
        yield f"| `{key.name}` | {key.kind} | {default} | {key.note} |".replace("  ", " ")
    yield ""


def _toml(section: Section) -> Iterator[str]:
    text = re.sub(r"\s+", " ", section.text)
    yield from (f"# {line}" for line in wrap(text, 118))
    yield section.title
    for key in section.keys:
        yield from (f"# {line}" for line in wrap(f"{key.kind}. {key.note}" if key.note else key.kind, 118))
        yield f"# {key.name} = {'(required)' if key.required else key.default}".rstrip()
    yield ""
