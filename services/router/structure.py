"""Structured output as a request may ask for it. What can be said without the compiler is said here, before anything is
done: what would be ignored is refused, so that an answer that ends by itself is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from stagemesh.shared.core.sampling import STRUCTURE_KINDS, Structure
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2

MAX_STRUCTURE_BYTES: Final = 64 << 10
NOT_ENFORCED: Final = frozenset(
    ("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "not", "then", "uniqueItems")
)
BRANCHES: Final = ("allOf", "anyOf", "oneOf")
ANNOTATIONS: Final = frozenset(("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated")) | {
    "description",
    "discriminator",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
}
_ONE: Final = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS: Final = (*BRANCHES, "prefixItems")
_NAMED: Final = ("$defs", "definitions", "patternProperties", "properties")


def structure_of(request: generator_pb2.GenerateRequest, eos_token_ids: tuple[int, ...]) -> Structure | None:
    """What the answer must match. Raises Rejected, naming the field."""
    field = request.WhichOneof("structure")
    if field is None:
        return None
    kind = next(kind for kind in STRUCTURE_KINDS if kind == field)
    text = getattr(request, kind)
    if not 0 < (size := len(text.encode())) <= MAX_STRUCTURE_BYTES:
        raise Rejected(kind, f"must be 1..{MAX_STRUCTURE_BYTES} bytes of UTF-8, got {size}")
    if request.ignore_eos:
        raise Rejected("ignore_eos", f"cannot be set with {kind}: the answer ends where it is complete")
    if not eos_token_ids:
        raise Rejected(kind, "needs a model with an end token, and this one has none")
    if kind == "json_schema":
        _check_schema(text)
    return Structure(kind, text)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise Rejected("json_schema", "nests too deep") from None
    except ValueError as error:
        raise Rejected("json_schema", f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise Rejected("json_schema", f"must be an object or a boolean, got {type(schema).__name__}")
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        path, part = left.pop()
        if isinstance(part, dict):
            if problem := _problem(part):
                raise Rejected("json_schema", f"at {path or '/'}: {problem}")
            left += [(f"{path}/{name}", inner) for name, inner in _inner(part)]


def _problem(part: dict[str, Any]) -> str | None:
    """What of this schema would not be enforced."""
    keys = part.keys() - ANNOTATIONS
    if found := sorted(keys & NOT_ENFORCED - ({"uniqueItems"} if part.get("uniqueItems") is False else set())):
        return f"{found[0]!r} is not supported"
    if "pattern" in keys and keys & {"minLength", "maxLength"}:
        return "'pattern' cannot be combined with 'minLength' and 'maxLength'"
    if "$ref" in keys:
        if not str(part["$ref"]).startswith("#"):
            return "'$ref' must be within the schema (#/...)"
        return _lonely("$ref", keys)
    for branch in BRANCHES:
        if branch in keys:
            if branch == "allOf" and isinstance(part[branch], list) and len(part[branch]) > 1:
                return "'allOf' of more than one schema is not supported"
            return _lonely(branch, keys - {"type"})
    return None


def _lonely(key: str, keys: set[str]) -> str | None:
    others = sorted(keys - {key})
    return f"{key!r} cannot be combined with {others[0]!r}" if others else None


def _inner(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((key, part[key]) for key in _ONE if key in part)
    for key in _LISTS:
        if isinstance(part.get(key), list):
            yield from ((f"{key}/{index}", inner) for index, inner in enumerate(part[key]))
    for key in _NAMED:
        if isinstance(part.get(key), dict):
            yield from ((f"{key}/{name}", inner) for name, inner in part[key].items())
