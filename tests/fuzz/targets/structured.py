"""What gateways send, and structures that answers must have: as a router checks them, and as they are compiled."""

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from stagemesh.services.router.engine_request import generate_request
from stagemesh.services.router.structure import structure_of
from stagemesh.shared.core.sampling import STRUCTURE_KINDS, Structure
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.engine_proto import engine_proto
from stagemesh.shared.rpc.messages import read_message
from stagemesh.shared.stage.structures import CompilerProcess, vocabulary_of
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import fill, json_bytes, junk_text, mutate_bytes
from tests.fuzz.targets.generate import LIMITS, open_tokenizer, take
from tests.support.schemas import RECORDS, SCHEMAS

EOS: Final = (2,)
REGEXES: Final = ("[a-z]{1,40}", "(a|b)*abb", r"\d{4}-\d{2}-\d{2}", "(a*)*b", "[^\\n]+", "(?:x{0,50}){0,50}", "\\p{L}+")
GRAMMARS: Final = (
    'root ::= "yes" | "no"',
    'root ::= item ("," item)*\nitem ::= [0-9]+',
    'root ::= "(" root ")" | ""',
    "root ::= root",
    "root ::= missing",
)


def text_of(rng: Random, kind: str) -> str:
    if kind == "json_schema":
        return json_bytes(rng, rng.choice((*SCHEMAS, *RECORDS))).decode(errors="replace")
    seeds: Sequence[str] = REGEXES if kind == "regex" else GRAMMARS
    if rng.random() < 0.1:
        return junk_text(rng)
    return mutate_bytes(rng, rng.choice(seeds).encode()).decode(errors="replace")


def structured(rng: Random) -> Structure | None:
    kind = rng.choice(STRUCTURE_KINDS)
    request = generator_pb2.GenerateRequest()
    setattr(request, kind, text_of(rng, kind))
    return structure_of(request, EOS)


def open_checks(folder: Path) -> Try:
    def attempt(rng: Random) -> None:
        structured(rng)

    return attempt


def open_compiler(folder: Path) -> Try:
    """The process with the limits that a last stage gives it: what it refuses is typed, and it lives on."""
    open_tokenizer(folder)
    loop = asyncio.new_event_loop()
    compiler = loop.run_until_complete(CompilerProcess.start(vocabulary_of(str(folder))))
    reads = loop.create_task(compiler.read())

    def close() -> None:
        loop.run_until_complete(compiler.close())
        loop.run_until_complete(reads)
        loop.close()

    atexit.register(close)

    def attempt(rng: Random) -> None:
        structure = structured(rng)
        assert structure is not None
        loop.run_until_complete(compiler.compile(structure))
        assert not compiler.is_gone

    return attempt


def open_gateway(folder: Path) -> Try:
    """Up to where the Generate API's own requests go."""
    tokenizer, known = open_tokenizer(folder), engine_proto()
    assert known is not None, "the extra [openai] is not installed"
    proto = known.engine

    def right(rng: Random) -> Any:
        request = proto.GenerateRequest(request_id="r", stream=rng.random() < 0.5)
        if rng.random() < 0.5:
            request.text = junk_text(rng) or "x"
        else:
            request.tokenized.input_ids.extend(rng.randrange(320) for _ in range(rng.randrange(1, 60)))
        asked = request.sampling_params
        asked.max_tokens, asked.temperature, asked.top_p, asked.n = rng.randrange(1, 400), 0.7, 0.9, 1
        if rng.random() < 0.2:
            asked.json_schema = json.dumps(rng.choice(SCHEMAS))
        return request

    def attempt(rng: Random) -> None:
        request = right(rng)
        if rng.random() < 0.5:
            request = read_message(proto.GenerateRequest, mutate_bytes(rng, request.SerializeToString()))
        else:
            extra = fill(rng, proto.GenerateRequest())
            for field in request.DESCRIPTOR.fields:
                if rng.random() < 0.7:
                    extra.ClearField(field.name)
            request.MergeFrom(extra)
        wanted = generate_request(request, LIMITS)
        take(tokenizer, wanted)
        structure_of(wanted, EOS)

    return attempt


TARGETS: Final = (
    Target("structures", 8, open_checks),
    Target("structure-compiler", 1, open_compiler, (Rejected,)),
    Target("gateway-requests", 8, open_gateway),
)
