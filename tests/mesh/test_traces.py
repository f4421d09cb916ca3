"""The trace of a request over all services, as a collector has it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from stagemesh.shared.pb import generator_pb2
from tests.support.client import token_request
from tests.support.collector import Received, collector
from tests.support.running import running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.full
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHUNK, PROMPT, NEW_TOKENS = 16, 40, 12
# three chunks on each of two stages, a write of each stage's share of them, decode steps on each of two stages
STAGES = {"prefill chunk": 6, "decode": 2}
ROUTER = {"request": 1, "tokenize": 1, "queue": 1, "first token": 1, "answer": 1}


async def ask(router: str) -> list[generator_pb2.GenerateResponse]:
    """As a client that is traced itself."""
    request = token_request(range(10, 10 + PROMPT), NEW_TOKENS, ignore_eos=True)
    async with grpc.aio.insecure_channel(router) as channel:
        call = channel.unary_stream(
            "/stagemesh.v1.Generator/Generate",
            request_serializer=generator_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generator_pb2.GenerateResponse.FromString,
        )
        return [response async for response in call(request, metadata=(("traceparent", PARENT),))]


def names(spans: list[Received]) -> Counter[str]:
    return Counter(received.span.name for received in spans)


def test_a_request_is_one_trace_over_router_prefill_transfer_and_decode(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_layers=4)
    with collector() as receiver:
        environ = {"STAGEMESH_OTEL__ENDPOINT": receiver.endpoint}
        options = ["--model", str(model), "--num-pages", "100", "--chunk-size", str(CHUNK)]
        with running_mesh(tmp_path, *options, environ=environ) as mesh:
            responses = asyncio.run(ask(mesh.router))
            asyncio.run(mesh.check_idle())
        spans = list(receiver.spans)  # every process has sent what it had when it was stopped
    assert responses[-1].finished.usage.completion_tokens == NEW_TOKENS
    counts = names(spans)
    assert counts == {**STAGES, **ROUTER, "kv transfer": counts["kv transfer"]}
    assert counts["kv transfer"] >= 4
    assert {received.trace_id for received in spans} == {PARENT[3:35]}
    (root,) = [received.span for received in spans if received.span.name == "request"]
    assert root.parent_span_id.hex() == PARENT[36:52]
    for received in spans:
        if received.span is not root and received.span.name != "request":
            assert received.span.parent_span_id == root.span_id, received.span.name
            assert root.start_time_unix_nano <= received.span.start_time_unix_nano, received.span.name
    assert {received.service for received in spans} == {f"stagemesh-{role}" for role in ("router", "prefill", "decode")}
    processes = {r.attributes["stagemesh.process"] for r in spans if r.span.name in STAGES}
    assert processes == {f"{role}-0/{rank}" for role in ("prefill", "decode") for rank in (0, 1)}
    steps = [r.attributes["stagemesh.steps"] for r in spans if r.span.name == "decode"]
    assert min(steps) >= NEW_TOKENS - 1
