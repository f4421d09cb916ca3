"""What a gateway asks for, in the words of the Generate API."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as engine

from stagemesh.services.router.engine_request import choice_grammar, generate_request
from stagemesh.services.router.validate import Limits
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2

LIMITS = Limits(vocab_size=100, max_request_tokens=50, max_text_bytes=1000, eos_token_ids=(2,))
PROMPT = [5, 6, 7]


def translated(*, stream: bool = True, prompt: Any = None, **sampling: Any) -> generator_pb2.GenerateRequest:
    asked = engine.GenerateRequest(request_id="r", stream=stream, sampling_params=engine.SamplingParams(**sampling))
    if isinstance(prompt, str):
        asked.text = prompt
    else:
        asked.tokenized.input_ids.extend(prompt or PROMPT)
    return generate_request(asked, LIMITS)


def test_every_field_arrives() -> None:
    wanted = translated(
        stream=False,
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=20,
        min_tokens=4,
        stop=["x", "yz"],
        stop_token_ids=[9],
        ignore_eos=True,
        n=3,
        logprobs=0,
        prompt_logprobs=2,
        seed=11,
        include_stop_str_in_output=True,
        logit_bias={3: -100.0},
    )
    expected = generator_pb2.GenerateRequest(
        request_id="r",
        whole=True,
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=20,
        min_tokens=4,
        stop=["x", "yz"],
        stop_token_ids=[9],
        ignore_eos=True,
        n=3,
        logprobs=0,
        prompt_logprobs=2,
        seed=11,
        include_stop=True,
        logit_bias={3: -100.0},
    )
    expected.token_ids.ids.extend(PROMPT)
    assert wanted == expected


def test_what_is_not_said_gets_the_defaults_of_these_clients_and_not_ours() -> None:
    wanted = translated()
    assert (wanted.temperature, wanted.n, wanted.whole) == (1.0, 1, False)
    for name in ("top_p", "repetition_penalty", "max_tokens", "seed", "logprobs", "prompt_logprobs"):
        assert not wanted.HasField(name), name


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (47, 47), (48, 47), (2**32 - 1, 47)])
def test_lengths_are_cut_to_what_fits_beside_the_prompt(asked: int, given: int) -> None:
    wanted = translated(max_tokens=asked, min_tokens=asked)
    assert (wanted.max_tokens, wanted.min_tokens) == (given, given)


def test_lengths_that_no_cut_makes_right_are_left_to_be_refused() -> None:
    assert translated(max_tokens=0).max_tokens == 0


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"prompt": [1] * 50}, r"^prompt: must be 1\.\.49 tokens .*, got 50$"),
        ({"stop": ["x"] * 65}, "^stop: must be at most 64 strings, got 65$"),
        ({"stop_token_ids": [1] * 65}, "^stop_token_ids: must be at most 64, got 65$"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "^logit_bias: must be at most 1024 tokens, got 1025$"),
        ({"choice": {"choices": ["x"] * 10_923}}, "^choice: must be at most 10922 texts, got 10923$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_too_long_is_not_even_copied(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(Rejected, match=problem):
        translated(**asked)


def test_a_text_may_ask_for_more_than_there_is_too() -> None:
    assert translated(prompt="abc", max_tokens=9).max_tokens == 9
    assert not translated(prompt="abc", max_tokens=51).HasField("max_tokens")


def test_other_forms_of_a_number() -> None:
    assert translated(seed=-1).seed == 2**64 - 1
    assert translated(top_k=5000).top_k == LIMITS.vocab_size


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"choice": {"choices": ["yes", 'n"o\n']}}, "ebnf", 'root ::= "yes" | "n\\"o\\n"'),
    ],
)
def test_structures(constraint: dict[str, Any], field: str, value: str) -> None:
    wanted = translated(**constraint)
    assert wanted.WhichOneof("structure") == field
    assert getattr(wanted, field) == value


@pytest.mark.parametrize("choices", [[], ["a", ""]])
def test_a_choice_of_nothing_is_refused(choices: list[str]) -> None:
    with pytest.raises(Rejected, match="choice: must be texts"):
        choice_grammar(choices)


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("structural_tag", {"sampling_params": {"structural_tag": "{}"}}),
        ("truncate_prompt_tokens", {"sampling_params": {"truncate_prompt_tokens": -1}}),
        ("kv_transfer_params", {"kv_transfer_params": {"remote_host": "h"}}),
        ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
        ("mm_inputs", {"mm_inputs": {}}),
        ("media_refs", {"media_refs": {}}),
        ("extra_mm_inputs", {"extra_mm_inputs": [{}]}),
        ("data_parallel_rank", {"data_parallel_rank": 1}),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(field: str, asked: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match=f"{field}: "):
        generate_request(engine.GenerateRequest(text="a", **asked), LIMITS)
