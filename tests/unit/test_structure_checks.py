"""What of a structure is refused before any compiler sees it: what would not be enforced, by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stagemesh.services.router.structure import structure_of
from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb.generator_pb2 import GenerateRequest
from tests.support.schemas import SCHEMAS

TEXT: dict[str, Any] = {"type": "string"}


def taken(schema: Any) -> Structure | None:
    return structure_of(GenerateRequest(json_schema=json.dumps(schema)), (2,))


@pytest.mark.parametrize(
    "schema", [*SCHEMAS, True, {"properties": {"not": TEXT, "$ref": TEXT}}, {"uniqueItems": False}]
)
def test_what_is_enforced_is_taken_as_it_is(schema: Any) -> None:
    assert taken(schema) == Structure("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"not": TEXT}, "at /: 'not' is not supported"),
        ({"properties": {"a": {"uniqueItems": True}}}, "at /properties/a: 'uniqueItems' is not supported"),
        ({"items": {"if": TEXT, "then": TEXT}}, "at /items: 'if' is not supported"),
        ({"anyOf": [TEXT, {"contains": TEXT}]}, "at /anyOf/1: 'contains' is not supported"),
        ({"$defs": {"x": {"dependentRequired": {}}}}, "at /$defs/x: 'dependentRequired' is not supported"),
        ({"allOf": [TEXT, TEXT]}, "'allOf' of more than one schema"),
        ({"anyOf": [TEXT], "properties": {}}, "'anyOf' cannot be combined with 'properties'"),
        ({"$ref": "#/$defs/x", "minimum": 3}, "'$ref' cannot be combined with 'minimum'"),
        ({"$ref": "http://elsewhere/x"}, "'$ref' must be within the schema"),
        ({**TEXT, "pattern": "a", "minLength": 2}, "'pattern' cannot be combined"),
    ],
)
def test_what_would_be_ignored_is_refused_by_its_place(schema: Any, problem: str) -> None:
    with pytest.raises(Rejected) as caught:
        taken(schema)
    assert caught.value.field == "json_schema"
    assert problem in str(caught.value)


def test_an_answer_that_cannot_end_is_refused() -> None:
    with pytest.raises(Rejected, match="ignore_eos: cannot be set with regex"):
        structure_of(GenerateRequest(regex="a", ignore_eos=True), (2,))
    with pytest.raises(Rejected, match="ebnf: needs a model with an end token"):
        structure_of(GenerateRequest(ebnf='root ::= "a"'), ())
    assert structure_of(GenerateRequest(), ()) is None
