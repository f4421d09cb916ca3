"""Untyped values to the typed sections, and msgspec's complaints to Rejected in the words of the config file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from stagemesh.shared.config.sections import Config
from stagemesh.shared.errors import Rejected

_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_KEY_COMPLAINTS = (
    (re.compile(r"Object contains unknown field `(?P<key>.*)`"), "unknown key"),
    (re.compile(r"Object missing required field `(?P<key>.*)`"), "is missing"),
)

_TYPE_WORDS = (
    (re.compile(r"`int( \| null)?`"), "a whole number"),
    (re.compile(r"`float( \| null)?`"), "a number"),
    (re.compile(r"`str( \| null)?`"), "text"),
    (re.compile(r"`bool( \| null)?`"), "true or false"),
    (re.compile(r"`object( \| null)?`"), "a table"),
    (re.compile(r"`array( \| null)?`"), "a list"),
)


def convert_document(tables: Mapping[str, Any]) -> Config:
    """The tables of a config file as a Config whose single values are in range. Raises Rejected."""
    document = dict(tables)
    if "instances" in document:
        raise Rejected("instances", "unknown key; an instance is a table [[instance]]")
    document["instances"] = document.pop("instance", [])
    try:
        return msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise _rejected(document, str(error)) from error


def convert_text(section: str, key: str, text: str) -> object:
    """The text of an environment variable as the type that `section.key` is declared with. Raises Rejected."""
    sections = {name: type_ for name, type_ in _field_types(Config).items() if name != "instances"}
    if section not in sections:
        raise Rejected(section, f"no such section to override; there are {', '.join(sections)}")
    types = _field_types(sections[section])
    if key not in types:
        raise Rejected(f"{section}.{key}", f"unknown key; there are {', '.join(types)}")
    try:
        value: object = msgspec.convert(text, types[key], strict=False)
    except msgspec.ValidationError as error:
        raise Rejected(f"{section}.{key}", f"{_expectation(str(error), types[key])}; it is {text!r}") from error
    return value


def _field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def _rejected(document: Mapping[str, Any], complaint: str) -> Rejected:
    match = _COMPLAINT.fullmatch(complaint)
    assert match is not None, complaint
    what, path = match["what"], match["path"] or ""
    for pattern, text in _KEY_COMPLAINTS:
        if (found := pattern.fullmatch(what)) is not None:
            return Rejected(_in_file(f"{path}.{found['key']}".removeprefix(".")), text)
    return Rejected(_in_file(path), f"{_expectation(what, _type_at(path))}; it is {_value_at(document, path)!r}")


def _in_file(path: str) -> str:
    return re.sub(r"^instances\b", "instance", path)


def _expectation(what: str, type_: Any) -> str:
    if what.startswith("Invalid enum value"):
        return f"expected one of {', '.join(type_.__args__)}"
    for pattern, text in _TYPE_WORDS:
        what = pattern.sub(text, what)
    return what[:1].lower() + what[1:]


def _type_at(path: str) -> Any:
    """The declared type of a path like `engine.page_size` or `instances[1].stages[0]`; an element's is its list's."""
    node: Any = Config
    for step in re.sub(r"\[[^]]*\]", "", path).split("."):
        node = _field_types(node)[step]
        node = node.__args__[0] if step == "instances" else node
    return node


def _value_at(document: Any, path: str) -> object:
    for step in re.findall(r"[^.\[\]]+", path):
        document = document[int(step)] if isinstance(document, list | tuple) else document[step]
    return document
