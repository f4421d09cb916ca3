"""What a client may ask for: every wrong field is named with its limit, and whatever passes is within them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.router.validate import Limits, check_prompt, max_request_bytes, priority_of, sampling_params
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb.generator_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds

LIMITS = Limits(vocab_size=100, max_request_tokens=32, max_text_bytes=40, eos_token_ids=(7, 8))
PROMPT = range(10)
INF, NAN, HUGE = math.inf, math.nan, 2**62


def validate(request: GenerateRequest) -> SamplingParams:
    check_prompt(request, LIMITS)
    priority_of(request)
    return sampling_params(request, PROMPT, LIMITS, seed=99)


def request_of(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": "hello", **fields})


def test_what_is_absent_has_its_default() -> None:
    params = validate(request_of())
    assert params == SamplingParams(max_tokens=22, seed=99, eos_token_ids=(7, 8))
    assert validate(request_of(seed=0)).seed == 0


def test_the_deployment_may_have_a_default_for_the_length() -> None:
    limits = Limits(100, 32, 40, (), default_max_tokens=5)
    assert sampling_params(request_of(), range(10), limits, seed=0).max_tokens == 5
    assert sampling_params(request_of(), range(30), limits, seed=0).max_tokens == 2
    assert sampling_params(request_of(max_tokens=20), range(10), limits, seed=0).max_tokens == 20


WRONG: list[tuple[str, list[Any], str]] = [
    (
        "max_tokens",
        [0, -1, 23, HUGE, -HUGE],
        r"1\.\.(31 \(32 for prompt and new tokens\)|22 \(32 for prompt and new tokens.* 10\))",
    ),
    ("temperature", [-0.1, 100.1, NAN, INF, -INF, 1e308], r"0\.0\.\.100\.0"),
    ("top_k", [-1, 101, HUGE, -HUGE], r"0\.\.100"),
    ("top_p", [0.0, -0.5, 1.0001, NAN, INF, -INF], r"\(0, 1\]"),
    ("min_p", [-0.1, 1.1, NAN, INF, -INF], r"0\.0\.\.1\.0"),
    ("min_tokens", [-1, 23, HUGE, -HUGE], r"0\.\.(31|22)"),
    ("logprobs", [-1, 21, HUGE], r"0\.\.20"),
    ("prompt_logprobs", [-1, 21, HUGE], r"0\.\.20"),
    ("presence_penalty", [-2.1, 2.1, NAN, INF], r"-2\.0\.\.2\.0"),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INF], r"-2\.0\.\.2\.0"),
    ("repetition_penalty", [0.0, -1.0, 10.1, NAN, INF], r"\(0, 10\.0\]"),
    ("logit_bias", [{-1: 1.0}, {100: 1.0}], r"0\.\.99"),
    ("logit_bias", [{1: 100.1}, {1: NAN}, {1: -INF}], r"-100\.0\.\.100\.0"),
    ("n", [0, -1, 65, HUGE], r"1\.\.64"),
    ("json_schema", ["", "x" * 65537], r"1\.\.65536 bytes"),
    ("json_schema", ["{", "nonsense"], "is not JSON"),
    ("json_schema", ["[1]", "3"], "must be an object or a boolean"),
    ("json_schema", ["[" * 60000], "nests too deep"),
    ("regex", [""], r"1\.\.65536 bytes"),
    ("ebnf", ["", "é" * 40000], r"1\.\.65536 bytes"),
    ("priority", [-101, 101, HUGE, -HUGE], r"-100\.\.100"),
    ("stop_token_ids", [[-1], [100], [5, HUGE]], r"0\.\.99"),
    ("stop_token_ids", [[1] * 65], "at most 64"),
    ("stop", [[""], ["x" * 257], ["fine", "é" * 129]], r"1\.\.256 bytes"),
    ("stop", [["x"] * 65], "at most 64"),
    ("text", ["", "x" * 41, "é" * 21], r"1\.\.40 bytes"),
    ("token_ids", [TokenIds(ids=[-1]), TokenIds(ids=[1, 100]), TokenIds(ids=[HUGE])], r"0\.\.99"),
    ("token_ids", [TokenIds()], "empty"),
    ("request_id", ["a b", "x" * 129, "a/b", "a\n", "ä"], r"1\.\.128 characters"),
]
CASES = [
    pytest.param(field, value, limit, id=f"{field}-{str(value)[:12]!r}")
    for field, values, limit in WRONG
    for value in values
]


@pytest.mark.parametrize(("field", "value", "limit"), CASES)
def test_a_wrong_field_is_named_with_its_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(Rejected, match=limit) as caught:
        validate(request_of(**{field: value}))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(("count", "most"), [(0, 43_690), (1, 32_768), (5, 16_384), (20, 5_698)])
def test_no_more_is_told_of_a_prompt_than_the_loop_may_make_at_once(count: int, most: int) -> None:
    request, limits = request_of(prompt_logprobs=count), replace(LIMITS, max_request_tokens=1 << 20)
    assert sampling_params(request, range(most), limits, seed=0).prompt_logprobs == count
    with pytest.raises(Rejected, match=f"prompts of at most {most} tokens, got {most + 1}") as caught:
        sampling_params(request, range(most + 1), limits, seed=0)
    assert caught.value.field == "prompt_logprobs"


RIGHT: list[tuple[str, list[Any]]] = [
    ("max_tokens", [1, 22]),
    ("temperature", [0.0, 100.0, 1e-300]),
    ("top_k", [0, 100]),
    ("top_p", [1.0, 5e-324]),
    ("min_p", [0.0, 1.0]),
    ("min_tokens", [0, 22]),
    ("logprobs", [0, 20]),
    ("stop_token_ids", [(0, 99), (1,) * 64]),
    ("seed", [0, 2**64 - 1]),
    ("ignore_eos", [True, False]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in RIGHT for value in values], ids=repr)
def test_a_value_on_the_limit_is_taken_as_it_is(field: str, value: Any) -> None:
    assert getattr(validate(request_of(**{field: value})), field) == value


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_a_priority_is_taken_as_it_is(priority: int) -> None:
    assert priority_of(request_of(priority=priority)) == priority
    assert priority_of(request_of()) == 0


CHATS = [
    pytest.param([], r"1\.\.1024 messages, got 0", id="none"),
    pytest.param([ChatMessage(role="user")] * 1025, r"1\.\.1024 messages, got 1025", id="too many"),
    pytest.param([ChatMessage(role="user", content="x" * 40)], "at most 40 bytes .* got 44", id="too long"),
    pytest.param([ChatMessage(role="user"), ChatMessage(content="x")], "message 1 has no role", id="no role"),
]


@pytest.mark.parametrize(("messages", "message"), CHATS)
def test_a_wrong_chat_is_named(messages: list[ChatMessage], message: str) -> None:
    with pytest.raises(Rejected, match=message) as caught:
        validate(GenerateRequest(chat=ChatMessages(messages=messages)))
    assert caught.value.field == "chat.messages"


def test_a_request_without_a_prompt_is_rejected() -> None:
    with pytest.raises(Rejected, match="one of text, token_ids and chat"):
        validate(GenerateRequest())


@pytest.mark.parametrize("prompt_tokens", [32, 33, 10_000])
def test_a_prompt_that_leaves_no_room_is_named_with_the_limit(prompt_tokens: int) -> None:
    with pytest.raises(Rejected, match=rf"^prompt: must be 1\.\.31 tokens .*, got {prompt_tokens}$"):
        sampling_params(request_of(), range(prompt_tokens), LIMITS, seed=0)
    assert sampling_params(request_of(), range(31), LIMITS, seed=0).max_tokens == 1


LONG: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", {"token_ids": TokenIds(ids=[100] * 32)}, r"1\.\.31 tokens .*, got 32$"),
    ("stop", {"stop": [""] * 65}, "at most 64 strings, got 65$"),
    ("stop_token_ids", {"stop_token_ids": [100] * 65}, "at most 64, got 65$"),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(100, 1125), 0.0)}, "at most 1024 tokens, got 1025$"),
]


@pytest.mark.parametrize(("field", "fields", "limit"), LONG, ids=[field for field, _, _ in LONG])
def test_what_is_too_long_is_refused_before_any_of_it_is_looked_at(
    field: str, fields: dict[str, Any], limit: str
) -> None:
    """What is within is wrong too, and is not what the error is about."""
    with pytest.raises(Rejected, match=limit) as caught:
        check_prompt(request_of(**fields), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "context", "mib"), [(1 << 20, 1 << 20, 16), (32 << 20, 1 << 20, 38), (1 << 20, 10 << 20, 52)]
)
def test_the_largest_valid_request_is_within_the_limit_of_a_message(text: int, context: int, mib: int) -> None:
    assert max_request_bytes(text, context) == mib << 20
    assert max_request_bytes(32 << 20, 100 << 20) == 64 << 20, "no channel of ours sends more"


def either(inside: st.SearchStrategy[Any], anywhere: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | inside | anywhere


INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
REQUESTS = st.builds(
    GenerateRequest,
    request_id=st.just("") | TEXT,
    text=either(st.just("hello"), TEXT),
    max_tokens=either(st.integers(1, 22), INT64),
    temperature=either(st.floats(0, 100), st.floats()),
    top_k=either(st.integers(0, 100), INT64),
    top_p=either(st.floats(0, 1), st.floats()),
    min_p=either(st.floats(0, 1), st.floats()),
    min_tokens=either(st.integers(0, 22), INT64),
    logprobs=either(st.integers(0, 20), INT64),
    seed=st.none() | st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3) | st.lists(INT64, max_size=70),
    stop=st.lists(TEXT, max_size=3),
    priority=either(st.integers(-100, 100), INT64),
)


def outcome(request: GenerateRequest) -> SamplingParams | Rejected:
    try:
        return validate(request)
    except Rejected as rejected:
        return rejected


@given(REQUESTS)
def test_any_request_is_either_within_all_limits_or_rejected(request: GenerateRequest) -> None:
    params = outcome(request)
    if isinstance(params, Rejected):
        assert params.field in {*GenerateRequest.DESCRIPTOR.fields_by_name, "prompt"}
        return
    assert 1 <= params.max_tokens <= 22
    assert 0.0 <= params.temperature <= 100.0
    assert 0 <= params.top_k <= LIMITS.vocab_size
    assert 0.0 < params.top_p <= 1.0
    assert 0.0 <= params.min_p <= 1.0
    assert 0 <= params.min_tokens <= params.max_tokens
    assert params.logprobs is None or 0 <= params.logprobs <= 20
    assert all(0 <= token < LIMITS.vocab_size for token in params.stop_token_ids)
    assert 0 <= params.seed < 2**64


def test_a_stop_rule_counts_from_min_tokens_on_and_ignore_eos_spares_stop_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, eos_token_ids=(1,), stop_token_ids=(2,))
    assert [params.ends(1, count) for count in (1, 2, 3)] == [False, False, True]
    ignoring = SamplingParams(max_tokens=9, ignore_eos=True, eos_token_ids=(1,), stop_token_ids=(2,))
    assert [ignoring.ends(token, 1) for token in (0, 1, 2)] == [False, False, True]
