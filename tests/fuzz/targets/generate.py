"""Requests of clients, as a router takes them: parsed, checked, tokenized, and turned into what its heads get."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

from stagemesh.services.router.stop import StopMatcher
from stagemesh.services.router.validate import Limits, check_prompt, priority_of, sampling_params
from stagemesh.shared.codec.commands import sampling_from_pb, sampling_to_pb
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.model.source import open_model
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.messages import read_message
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import fill, junk_text, mutate_bytes
from tests.fuzz.tiny import write_config
from tests.support.tiny_models import write_tokenizer

LIMITS: Final = Limits(320, 500, 1 << 20, (2,))


def request_of(rng: Random) -> generator_pb2.GenerateRequest:
    """One that is right."""
    request = generator_pb2.GenerateRequest(request_id=f"r{rng.randrange(9)}", max_tokens=rng.randrange(1, 400))
    match rng.randrange(3):
        case 0:
            request.text = rng.choice(("The river runs", "naïve 🌊", "a b" * 30, junk_text(rng) or "x"))
        case 1:
            request.token_ids.ids.extend(rng.randrange(320) for _ in range(rng.randrange(1, 60)))
        case _:
            for role in rng.choices(("system", "user", "assistant"), k=rng.randrange(1, 5)):
                request.chat.messages.add(role=role, content=junk_text(rng))
    if rng.random() < 0.5:
        request.temperature, request.top_p, request.top_k, request.min_p = 0.7, 0.9, 40, 0.1
        request.stop.extend(("\n\n", "END"))
        request.logprobs, request.seed, request.min_tokens = 3, 1 << 63, 1
    return request


def take(tokenizer: Tokenizer, request: generator_pb2.GenerateRequest) -> SamplingParams:
    """What `GeneratorService` does with a request before it starts it."""
    check_prompt(request, LIMITS)
    match request.WhichOneof("prompt"):
        case "text":
            token_ids = tokenizer.encode(request.text)
        case "chat":
            messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
            token_ids = tokenizer.apply_chat(messages)
        case _:
            token_ids = list(request.token_ids.ids)
    sampling = sampling_params(request, token_ids, LIMITS, seed=1)
    priority_of(request)
    StopMatcher(request.stop, include=request.include_stop)
    stream = tokenizer.stream()
    for token_id in token_ids[:50]:
        stream.push(token_id)
    stream.finish()
    return sampling


def open_tokenizer(folder: Path) -> Tokenizer:
    write_config(folder)
    write_tokenizer(folder)
    return open_model(str(folder)).tokenizer()


def from_bytes(folder: Path) -> Try:
    tokenizer = open_tokenizer(folder)

    def attempt(rng: Random) -> None:
        data = request_of(rng).SerializeToString()
        data = rng.randbytes(rng.randrange(200)) if rng.random() < 0.1 else mutate_bytes(rng, data)
        take(tokenizer, read_message(generator_pb2.GenerateRequest, data))

    return attempt


def from_fields(folder: Path) -> Try:
    tokenizer = open_tokenizer(folder)

    def attempt(rng: Random) -> None:
        request = request_of(rng)
        extra = fill(rng, generator_pb2.GenerateRequest())
        keep = {field.name for field in request.DESCRIPTOR.fields if rng.random() < 0.85}
        for name in keep:
            extra.ClearField(name)
        request.MergeFrom(extra)
        sampling = take(tokenizer, request)
        assert sampling_from_pb(sampling_to_pb(sampling)) == sampling

    return attempt


TARGETS: Final = (Target("generate-bytes", 24, from_bytes), Target("generate-fields", 16, from_fields))
