"""Twenty JSON schemas, each with something that others do not have, whose answers are short whatever the model says."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]
SHORT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 8}
DIGIT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Final[Schema] = {"type": "boolean"}


def _object(required: dict[str, Any], **more: Any) -> Schema:
    closed = {"type": "object", "properties": required, "required": list(required), "additionalProperties": False}
    return {**closed, **more}


def _list(items: Any, least: int, most: int, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


LINK: Final[Schema] = {"anyOf": [{"$ref": "#/$defs/end"}, {"type": "null"}]}
TREE: Final = _object({"name": {"enum": ["leaf", "node"]}, "next": LINK})
SCHEMAS: Final[tuple[Schema, ...]] = (
    _object({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    _object({"ok": FLAG}),
    _list(DIGIT, 1, 4),
    {"enum": ["red", "green", "blue", 7, None, True]},
    _object({"kind": {"const": "event"}, "level": {"enum": ["debug", "info", "error"]}}),
    _object({"point": _object({"x": DIGIT, "y": DIGIT})}),
    _list(_object({"id": DIGIT}), 1, 2),
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    _object({"a": DIGIT, "b": SHORT, "c": FLAG}),
    {**_object({"id": DIGIT}), "properties": {"id": DIGIT, "note": SHORT}},
    {"anyOf": [_object({"cat": FLAG}), _object({"dog": DIGIT})]},
    {"type": "array", "prefixItems": [SHORT, DIGIT], "items": False, "minItems": 2},
    {"type": "integer", "minimum": -50, "maximum": 50},
    _object({"value": {"type": ["integer", "null"], "minimum": 0, "maximum": 99}}),
    {**TREE, "$defs": {"end": _object({"name": {"const": "end"}})}},
    _object({"tags": _list({"enum": ["new", "old", "hot"]}, 0, 3)}),
    {"type": "object", "patternProperties": {"^k[0-9]$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
    _object({"when": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}, "open": FLAG}),
    _object({"matrix": _list(_list(DIGIT, 2, 2), 1, 2)}),
)


def record_of(schema: Schema) -> Schema:
    """An object with an answer to `schema` in it, as long as those that people ask for."""
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    note = {"type": "string", "minLength": 40, "maxLength": 60}
    fields = {"id": {"type": "integer", "minimum": 0, "maximum": 9999}, "note": note, "value": inner}
    return {**_object(fields), "$defs": schema.get("$defs", {})}


RECORDS: Final = tuple(map(record_of, SCHEMAS))
