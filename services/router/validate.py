"""What a client may ask for. Every wrong field gets an error that names it and the limit, before anything is done."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stagemesh.services.router.structure import structure_of
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.options import MAX_MESSAGE_BYTES

MAX_STOP_TOKEN_IDS: Final = 64
MAX_STOP_STRINGS: Final = 64
MAX_STOP_BYTES: Final = 256
MAX_LOGPROBS: Final = 20
MAX_MESSAGES: Final = 1024
MAX_TEMPERATURE: Final = 100.0
MAX_PRIORITY: Final = 100  # and at least minus that
MAX_PENALTY: Final = 2.0  # and at least minus that
MAX_REPETITION_PENALTY: Final = 10.0
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0  # and at least minus that
MAX_ANSWERS: Final = 64
MAX_PROMPT_LOGPROBS: Final = 1 << 17
"""Of a prompt, all told. They come at once: while they are coded, for about 0.1 s, head and router do nothing else."""
PROMPT_TOKEN_LOGPROBS: Final = 3  # what a token costs beside its likeliest ones, in terms of those
MIN_REQUEST_LIMIT_BYTES: Final = 16 << 20
MAX_ID_BYTES: Final = 5  # of a token id below 2^31, as a varint
MAX_REST_BYTES: Final = 1 << 20  # of a request but for its prompt: lists, structure and what frames 1024 messages
_LISTS: Final = (
    ("stop", MAX_STOP_STRINGS, " strings"),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS, ""),
    ("logit_bias", MAX_BIASES, " tokens"),
)
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the model and of this deployment. `max_request_tokens` is prompt and new tokens together."""

    vocab_size: int
    max_request_tokens: int
    max_text_bytes: int
    eos_token_ids: tuple[int, ...]
    default_max_tokens: int | None = None


def max_request_bytes(max_text_bytes: int, max_context: int) -> int:
    """Of a message: what the largest valid request needs, text and token ids at once, and for all but the longest
    contexts more. A message is parsed in one go on the loop, so that no larger one may come in."""
    largest = max_text_bytes + max_context * MAX_ID_BYTES + MAX_REST_BYTES
    return min(max(largest, MIN_REQUEST_LIMIT_BYTES), MAX_MESSAGE_BYTES)


def check_lists(asked: Any) -> None:
    """How many there are of what may be several, before any of them is looked at or copied. `asked` is a
    GenerateRequest, or another message whose fields have the same names. Raises Rejected."""
    for field, most, what in _LISTS:
        if (count := len(getattr(asked, field))) > most:
            raise Rejected(field, f"must be at most {most}{what}, got {count}")


def check_prompt_tokens(count: int, limits: Limits) -> None:
    """Raises Rejected if so many leave no room for a new one."""
    most = limits.max_request_tokens - 1
    if count > most:
        raise Rejected("prompt", f"must be 1..{most} tokens (context and page pool), got {count}")


def check_prompt(request: generator_pb2.GenerateRequest, limits: Limits) -> None:
    """What can be said before the prompt is tokenized. Raises Rejected."""
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise Rejected("request_id", "must be 1..128 characters of A-Z a-z 0-9 . _ : -")
    answers_of(request)
    priority_of(request)
    _of_any_prompt(request, limits)
    prompt_tokens = None
    match request.WhichOneof("prompt"):
        case "text":
            _check_text("text", request.text, limits)
        case "token_ids":
            _check_token_ids(request.token_ids.ids, limits)
            prompt_tokens = len(request.token_ids.ids)
        case "chat":
            _check_chat(request.chat, limits)
        case _:
            raise Rejected("prompt", "one of text, token_ids and chat must be set")
    _lengths(request, prompt_tokens, limits)


def _check_text(field: str, text: str, limits: Limits) -> None:
    size = len(text.encode())
    if not 0 < size <= limits.max_text_bytes:
        raise Rejected(field, f"must be 1..{limits.max_text_bytes} bytes of UTF-8, got {size}")


def _check_token_ids(token_ids: Sequence[int], limits: Limits) -> None:
    if not token_ids:
        raise Rejected("token_ids", "must not be empty")
    check_prompt_tokens(len(token_ids), limits)
    ids = np.array(token_ids)  # one copy of memory: a loop over a long context would hold up all others
    wrong = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if wrong.size:
        problem = f"must be in 0..{limits.vocab_size - 1}, got {ids[wrong[0]]} at index {wrong[0]}"
        raise Rejected("token_ids", problem)


def _check_chat(chat: generator_pb2.ChatMessages, limits: Limits) -> None:
    if not 0 < len(chat.messages) <= MAX_MESSAGES:
        raise Rejected("chat.messages", f"must be 1..{MAX_MESSAGES} messages, got {len(chat.messages)}")
    size = sum(len(message.content.encode()) + len(message.role.encode()) for message in chat.messages)
    if size > limits.max_text_bytes:
        raise Rejected("chat.messages", f"must have at most {limits.max_text_bytes} bytes of UTF-8, got {size}")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise Rejected("chat.messages", f"message {index} has no role")


def sampling_params(
    request: generator_pb2.GenerateRequest, prompt: Sequence[int], limits: Limits, *, seed: int
) -> SamplingParams:
    """The request's parameters, with defaults; `prompt` is its token ids; `seed` is for a request that gives none.
    Raises Rejected."""
    lengths = _lengths(request, len(prompt), limits)
    params = _of_any_prompt(request, limits)
    return replace(
        params,
        max_tokens=lengths.max_tokens,
        min_tokens=lengths.min_tokens,
        prompt_logprobs=lengths.prompt_logprobs,
        seed=request.seed if request.HasField("seed") else seed,
        prompt_ids=() if params.repetition_penalty == 1 else tuple(sorted(set(prompt))),
    )


def _lengths(request: generator_pb2.GenerateRequest, prompt_tokens: int | None, limits: Limits) -> SamplingParams:
    """What depends on the prompt's. None: that is not known yet, so that only what no prompt makes right is wrong."""
    max_tokens = _max_tokens(request, prompt_tokens, limits)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_whole("min_tokens", request.min_tokens, 0, max_tokens),
        prompt_logprobs=_prompt_logprobs(request, prompt_tokens or 1),
    )


def _of_any_prompt(request: generator_pb2.GenerateRequest, limits: Limits) -> SamplingParams:
    """The parameters that are the same whatever the prompt."""
    check_lists(request)
    _check_stop_strings(request.stop)
    return SamplingParams(
        max_tokens=1,
        temperature=_number("temperature", request.temperature, 0.0, MAX_TEMPERATURE),
        top_k=_whole("top_k", request.top_k, 0, limits.vocab_size),
        top_p=_top_p(request),
        ignore_eos=request.ignore_eos,
        eos_token_ids=limits.eos_token_ids,
        stop_token_ids=_stop_token_ids(request.stop_token_ids, limits),
        min_p=_number("min_p", request.min_p, 0.0, 1.0),
        logprobs=_whole("logprobs", request.logprobs, 0, MAX_LOGPROBS) if request.HasField("logprobs") else None,
        presence_penalty=_number("presence_penalty", request.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_number("frequency_penalty", request.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=_repetition_penalty(request),
        logit_bias=_logit_bias(request, limits),
        structure=structure_of(request, limits.eos_token_ids),
    )


def answers_of(request: generator_pb2.GenerateRequest) -> int:
    """How many are asked for. Raises Rejected."""
    return _whole("n", request.n, 1, MAX_ANSWERS) if request.HasField("n") else 1


def priority_of(request: generator_pb2.GenerateRequest) -> int:
    """Higher is served first; 0 if the client says nothing. Raises Rejected."""
    return _whole("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)


def _repetition_penalty(request: generator_pb2.GenerateRequest) -> float:
    if not request.HasField("repetition_penalty"):
        return 1.0
    if not 0.0 < request.repetition_penalty <= MAX_REPETITION_PENALTY:  # also false for NaN
        raise Rejected(
            "repetition_penalty", f"must be in (0, {MAX_REPETITION_PENALTY}], got {request.repetition_penalty}"
        )
    return request.repetition_penalty


def _logit_bias(request: generator_pb2.GenerateRequest, limits: Limits) -> tuple[tuple[int, float], ...]:
    for token_id in request.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise Rejected("logit_bias", f"token ids must be in 0..{limits.vocab_size - 1}, got {token_id}")
    biases = sorted(request.logit_bias.items())
    return tuple((token_id, _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)) for token_id, bias in biases)


def _prompt_logprobs(request: generator_pb2.GenerateRequest, prompt_tokens: int) -> int | None:
    if not request.HasField("prompt_logprobs"):
        return None
    count = _whole("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    most = MAX_PROMPT_LOGPROBS // (count + PROMPT_TOKEN_LOGPROBS)
    if prompt_tokens > most:
        problem = f"{count} likeliest tokens each are told of prompts of at most {most} tokens, got {prompt_tokens}"
        raise Rejected("prompt_logprobs", problem)
    return count


def _check_stop_strings(stops: Sequence[str]) -> None:
    for index, stop in enumerate(stops):
        if not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
            raise Rejected("stop", f"must be 1..{MAX_STOP_BYTES} bytes of UTF-8, got {len(stop.encode())} at {index}")


def _max_tokens(request: generator_pb2.GenerateRequest, prompt_tokens: int | None, limits: Limits) -> int:
    check_prompt_tokens(prompt_tokens or 1, limits)
    room = limits.max_request_tokens - (prompt_tokens or 1)
    if not request.HasField("max_tokens"):
        return min(room, limits.default_max_tokens or room)
    if not 1 <= request.max_tokens <= room:
        takes = "" if prompt_tokens is None else f", of which the prompt takes {prompt_tokens}"
        both = f"{limits.max_request_tokens} for prompt and new tokens{takes}"
        raise Rejected("max_tokens", f"must be in 1..{room} ({both}), got {request.max_tokens}")
    return request.max_tokens


def _top_p(request: generator_pb2.GenerateRequest) -> float:
    if not request.HasField("top_p"):
        return 1.0
    if not 0.0 < request.top_p <= 1.0:  # also false for NaN
        raise Rejected("top_p", f"must be in (0, 1], got {request.top_p}")
    return request.top_p


def _number(field: str, value: float, lowest: float, highest: float) -> float:
    if math.isnan(value) or not lowest <= value <= highest:
        raise Rejected(field, f"must be in {lowest}..{highest}, got {value}")
    return value


def _whole(field: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise Rejected(field, f"must be in {lowest}..{highest}, got {value}")
    return value


def _stop_token_ids(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    for token_id in token_ids:
        _whole("stop_token_ids", token_id, 0, limits.vocab_size - 1)
    return tuple(token_ids)
