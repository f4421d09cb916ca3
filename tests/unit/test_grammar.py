"""Matchers over real grammars: masks follow the tokens, also backwards; what would hold others up is ended."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.core.sampling import SamplingParams, Structure, StructureKind
from stagemesh.shared.engine import grammar
from stagemesh.shared.engine.grammar import Grammars, Matcher
from stagemesh.shared.engine.output_state import OutputState
from stagemesh.shared.engine.vocabulary import Vocabulary, compile_structure
from stagemesh.shared.errors import Rejected

END = 0
CHARACTERS = "".join(map(chr, range(32, 127)))
RAW = json.dumps({"decoder": {"type": "Fuse"}, "model": {"type": "BPE"}})
VOCABULARY = Vocabulary(["", "", *CHARACTERS, "true", '":', "ab"], RAW, [END])
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
    "additionalProperties": False,
}


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(VOCABULARY)
    yield made
    made.close()


def begin(grammars: Grammars, kind: StructureKind, text: str) -> Matcher:
    structure = Structure(kind, text)
    if not grammars.touch(structure):
        grammars.take(structure, compile_structure(VOCABULARY, structure), 1000)
    return grammars.matcher(structure)


def allowed(matcher: Matcher, banned: tuple[int, ...] = ()) -> set[int]:
    words = matcher.mask(banned).numpy().view(np.uint32)
    return {token_id for token_id in range(len(VOCABULARY.tokens)) if words[token_id // 32] >> token_id % 32 & 1}


def ids(text: str) -> list[int]:
    return [2 + CHARACTERS.index(character) for character in text]


def test_random_walks_through_a_schema_are_valid(grammars: Grammars) -> None:
    for seed in range(20):
        rng, matcher, text = random.Random(seed), begin(grammars, "json_schema", json.dumps(SCHEMA)), ""
        while (token_id := rng.choice(sorted(allowed(matcher)))) != END:
            assert VOCABULARY.tokens[token_id], "a special token is no text"
            text += VOCABULARY.tokens[token_id]
            matcher.accept(token_id)
        jsonschema.validate(json.loads(text), SCHEMA)


def test_strings_have_no_control_characters_however_long_they_may_be() -> None:
    vocabulary = Vocabulary([*VOCABULARY.tokens, "\t", "a\x15", "é"], RAW, [END])
    made, structure = Grammars(vocabulary), Structure("json_schema", '{"type": "string", "maxLength": 3}')
    made.take(structure, compile_structure(vocabulary, structure), 1)
    matcher = made.matcher(structure)
    matcher.accept(ids('"')[0])
    first = len(VOCABULARY.tokens)
    words = matcher.mask().numpy().view(np.uint32)
    assert [bool(words[place // 32] >> place % 32 & 1) for place in range(first, first + 3)] == [False, False, True]
    made.close()


def test_an_end_is_allowed_where_the_grammar_is_complete_and_only_then(grammars: Grammars) -> None:
    matcher = begin(grammars, "regex", "ab?")
    assert END not in allowed(matcher)
    matcher.accept(ids("a")[0])
    assert allowed(matcher) == {END, *ids("b")}
    matcher.accept(ids("b")[0])
    assert allowed(matcher) == {END}
    matcher.accept(END)
    assert allowed(matcher) == {END}, "what comes after an end is discarded"
    matcher.go_back(1)
    assert allowed(matcher) == {END, *ids("b")}


def test_what_is_banned_gives_way_where_nothing_else_is_allowed(grammars: Grammars) -> None:
    matcher = begin(grammars, "regex", "ab?")
    matcher.accept(ids("a")[0])
    assert allowed(matcher, (END,)) == set(ids("b"))
    matcher.accept(ids("b")[0])
    assert allowed(matcher, (END,)) == {END}


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_going_back_is_as_if_it_had_never_gone_on(data: st.DataObject) -> None:
    made = Grammars(VOCABULARY)
    try:
        matcher = begin(made, "regex", "(ab|c|d[0-9]){0,6}")
        path: list[int] = []
        for _ in range(data.draw(st.integers(1, 12))):
            back = data.draw(st.booleans())
            if path and back:
                path = path[: data.draw(st.integers(0, len(path) - 1))]
                matcher.go_back(len(path))
            else:
                choices = [*sorted(allowed(matcher)), *ids("z")]  # the last one is off its way
                path.append(choices[data.draw(st.integers(0, len(choices) - 1))])
                matcher.accept(path[-1])
        again = begin(made, "regex", "(ab|c|d[0-9]){0,6}")
        for token_id in path:
            again.accept(token_id)
        assert allowed(matcher) == allowed(again)
    finally:
        made.close()


def test_an_earlier_attempts_output_has_been_accepted(grammars: Grammars) -> None:
    structure = Structure("ebnf", 'root ::= "abc" | "xyz"')
    begin(grammars, structure.kind, structure.text)
    params = SamplingParams(max_tokens=9, structure=structure, generated=tuple(ids("xy")))
    state = OutputState(params, 30, grammars.matcher(structure))
    state.feed(28, [*ids("xy")])
    assert state.matcher is not None
    assert allowed(state.matcher) == set(ids("z"))


def test_masks_that_take_ever_longer_end_their_sequence_and_no_other(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "FREE_NS", 20_000_000)
    monkeypatch.setattr(grammar, "TOKEN_NS", 0)
    bad = begin(grammars, "ebnf", 'root ::= s\ns ::= s s | "a" | ""')
    good = begin(grammars, "regex", "[a-z]{1,20}")
    for _ in range(400):
        bad.accept(ids("a")[0])
    assert allowed(bad) == {END}
    assert "its masks take too long" in bad.failure
    good.accept(ids("q")[0])
    assert not good.failure
    assert END in allowed(good)


def test_the_cache_is_bounded_and_what_it_forgets_is_compiled_again() -> None:
    made = Grammars(VOCABULARY, max_grammars=2, max_bytes=2500)
    structures = [Structure("regex", letter) for letter in "abc"]
    for structure in structures[:2]:
        made.take(structure, compile_structure(VOCABULARY, structure), 1000)
    assert made.touch(structures[0])
    made.take(structures[2], compile_structure(VOCABULARY, structures[2]), 1000)
    assert [structure in made for structure in structures] == [True, False, True]
    made.take(Structure("regex", "d"), compile_structure(VOCABULARY, Structure("regex", "d")), 2000)
    assert len(made) == 1, "of bytes"
    assert allowed(made.matcher(structures[1])) == set(ids("b"))
    assert made.late_compiles == 1
    made.close()


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"type": "objekt"}', 'json_schema: Unsupported type "objekt"'),
        ("regex", "([a-z", "regex: Regex parsing error at position 6: Unclosed '['"),
        ("ebnf", "root ::= ", "ebnf: EBNF parser error at line 1"),
        ("ebnf", 'tree ::= "a"', '"root" is not found'),
    ],
)
def test_what_is_none_is_refused_by_its_field(kind: StructureKind, text: str, problem: str) -> None:
    with pytest.raises(Rejected) as caught:
        compile_structure(VOCABULARY, Structure(kind, text))
    assert caught.value.field == kind
    assert problem in str(caught.value)
    assert "/project/" not in str(caught.value)
