"""A gateway's request in the words of the Generate API. Pure. What would be ignored is refused; what the Generate API
judges is passed on to it, so that a wrong value gets the same answer through either door."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from stagemesh.services.router.structure import MAX_STRUCTURE_BYTES
from stagemesh.services.router.validate import Limits, check_lists, check_prompt_tokens
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2

ANY_OBJECT: Final = '{"type": "object"}'
MAX_CHOICES: Final = MAX_STRUCTURE_BYTES // len('"x" | ')  # no grammar of more is within its limit
MASK_64: Final = (1 << 64) - 1
_FOREIGN: Final = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs")
_SAME: Final = (
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
_COUNTS: Final = ("logprobs", "prompt_logprobs")


def generate_request(request: Any, limits: Limits) -> generator_pb2.GenerateRequest:
    """`request` is a `vllm.grpc.engine.GenerateRequest`. Raises Rejected."""
    _refuse_foreign(request)
    asked = request.sampling_params
    check_lists(asked)
    wanted = generator_pb2.GenerateRequest(
        request_id=request.request_id,
        whole=not request.stream,
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_k=min(asked.top_k, limits.vocab_size),
        include_stop=asked.include_stop_str_in_output,
        n=max(asked.n, 1),
        **{name: getattr(asked, name) for name in _SAME},
        **{name: getattr(asked, name) for name in _COUNTS if asked.HasField(name)},
    )
    if asked.top_p:  # a filter that keeps nothing is one that was not given
        wanted.top_p = asked.top_p
    if asked.repetition_penalty:
        wanted.repetition_penalty = asked.repetition_penalty
    if asked.HasField("seed"):
        wanted.seed = asked.seed & MASK_64
    wanted.logit_bias.update(asked.logit_bias)
    _set_prompt(wanted, request, limits)
    _set_lengths(wanted, asked, limits)
    _set_structure(wanted, asked)
    return wanted


def _refuse_foreign(request: Any) -> None:
    for name in _FOREIGN:
        if request.HasField(name):
            raise Rejected(name, "is not supported: this model takes text, and the mesh moves its KV itself")
    if request.extra_mm_inputs:
        raise Rejected("extra_mm_inputs", "is not supported: this model takes text")
    if request.data_parallel_rank:
        raise Rejected("data_parallel_rank", f"must be 0 or absent, got {request.data_parallel_rank}")
    if request.sampling_params.truncate_prompt_tokens:
        raise Rejected("truncate_prompt_tokens", "is not supported: send the prompt that is to be used")


def _set_prompt(wanted: generator_pb2.GenerateRequest, request: Any, limits: Limits) -> None:
    match request.WhichOneof("input"):
        case "tokenized":
            check_prompt_tokens(len(request.tokenized.input_ids), limits)
            wanted.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            wanted.text = request.text


def _set_lengths(wanted: generator_pb2.GenerateRequest, asked: Any, limits: Limits) -> None:
    """What does not fit beside the prompt is cut to what does, as these clients know it; how long a text is, is not
    known here, so that one beyond the limit gets what there is."""
    room = limits.max_request_tokens - len(wanted.token_ids.ids)
    if asked.HasField("max_tokens") and (asked.max_tokens <= room or wanted.WhichOneof("prompt") == "token_ids"):
        wanted.max_tokens = min(asked.max_tokens, max(room, 1))
    wanted.min_tokens = min(asked.min_tokens, wanted.max_tokens if wanted.HasField("max_tokens") else max(room, 0))


def _set_structure(wanted: generator_pb2.GenerateRequest, asked: Any) -> None:
    match asked.WhichOneof("constraint"):
        case "json_schema":
            wanted.json_schema = asked.json_schema
        case "regex":
            wanted.regex = asked.regex
        case "grammar":
            wanted.ebnf = asked.grammar
        case "json_object":
            wanted.json_schema = ANY_OBJECT
        case "choice":
            wanted.ebnf = choice_grammar(asked.choice.choices)
        case "structural_tag":
            raise Rejected("structural_tag", "is not supported: use json_schema, regex or grammar")


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar for one of the choices, word for word. Raises Rejected."""
    if len(choices) > MAX_CHOICES:
        raise Rejected("choice", f"must be at most {MAX_CHOICES} texts, got {len(choices)}")
    if not choices or not all(choices):
        raise Rejected("choice", "must be texts, of one character at least")
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
