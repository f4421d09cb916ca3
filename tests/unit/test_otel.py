"""Traces of requests: ids that follow from the request's id, spans that reach a real collector."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.core.commands import Command, Join, SendPlan, Step
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.otel import NO_SPANS, Attributes, Spans, open_spans
from stagemesh.shared.obs.request_spans import RequestSpans
from stagemesh.shared.obs.trace_ids import TraceIds, is_sampled, parse_traceparent, request_id_of, trace_of
from tests.support.collector import collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST = RequestRef("request-7", 2)


class Kept:
    """Spans that a test looks at."""

    enabled = True

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, Attributes]] = []

    def span(self, name: str, request_id: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        assert 0 < start_ns <= end_ns
        self.spans.append((name, request_id, attributes))

    def root(self, ids: TraceIds, start_ns: int, end_ns: int, attributes: Attributes, *, error: str = "") -> None:
        raise AssertionError("a stage has no roots")


def config(**otel: Any) -> Config:
    document = {**local_document(LocalLayout(), Path("/run/stagemesh")), "otel": otel}
    return build_config(document, source="here", environ={})


def test_a_clients_trace_goes_into_the_requests_id_and_comes_out_anywhere() -> None:
    ids = parse_traceparent(PARENT)
    assert ids is not None
    assert (f"{ids.trace_id:032x}", f"{ids.parent_id:016x}") == (PARENT[3:35], PARENT[36:52])
    found = trace_of(request_id_of(ids))
    assert (found.trace_id, found.span_id) == (ids.trace_id, ids.span_id)


@pytest.mark.parametrize(
    "header", ["", "00-abc-def-01", f"ff{PARENT[2:]}", f"00-{'0' * 32}-{'1' * 16}-01", f"x{PARENT}"]
)
def test_what_is_no_traceparent_is_none(header: str) -> None:
    assert parse_traceparent(header) is None


@given(st.text(min_size=1, max_size=40))
def test_every_id_has_one_trace(request_id: str) -> None:
    ids = trace_of(request_id)
    assert ids == trace_of(request_id)
    assert 0 < ids.trace_id < 1 << 128
    assert 0 < ids.span_id < 1 << 64


def test_a_share_of_the_traces_is_sampled() -> None:
    ids = [trace_of(f"request-{number}").trace_id for number in range(1000)]
    assert not any(is_sampled(trace_id, 0.0) for trace_id in ids)
    assert all(is_sampled(trace_id, 1.0) for trace_id in ids)
    assert 200 < sum(is_sampled(trace_id, 0.25) for trace_id in ids) < 300


def step(*rows: tuple[int, int, int]) -> Step:
    """Of rows (handle, start, count)."""
    return Step(1, 0, np.array([(*row, 0, 0, 0) for row in rows], dtype=np.int64), np.zeros(0, dtype=np.int64))


def join(handle: int) -> Join:
    return Join(handle, REQUEST, SamplingParams(max_tokens=5), SendPlan("t1", 9, (), ()), 9)


def test_a_prefill_stage_has_a_span_for_each_chunk_and_each_write() -> None:
    kept = Kept()
    spans = RequestSpans(kept, "prefill", "prefill-0/1")
    now_ns = time.monotonic_ns()
    spans.applied(Command(1, joins=(join(3),)))
    spans.ran(step((3, 0, 8), (4, 0, 8)), now_ns)  # of 4 nothing is known: it joined before
    spans.ran(step((3, 8, 1)), now_ns)
    spans.wrote("t1", now_ns, now_ns + 1, num_bytes=64, state="done")
    spans.reported("t1")
    spans.wrote("t1", now_ns, now_ns + 1, num_bytes=64, state="done")
    spans.applied(Command(2, drops=(3,)))
    assert [(name, request_id) for name, request_id, _ in kept.spans] == [
        ("prefill chunk", "request-7"),
        ("prefill chunk", "request-7"),
        ("kv transfer", "request-7"),
    ]
    assert kept.spans[1][2] == {
        "stagemesh.process": "prefill-0/1",
        "stagemesh.attempt": 2,
        "stagemesh.start": 8,
        "stagemesh.tokens": 1,
    }


def test_a_decode_stage_has_one_span_for_all_steps_and_a_handle_may_come_again() -> None:
    kept = Kept()
    spans = RequestSpans(kept, "decode", "decode-0/0")
    spans.applied(Command(1, joins=(join(3),)))
    for _ in range(4):
        spans.ran(step((3, 9, 1)), time.monotonic_ns())
    spans.applied(Command(2, drops=(3,), joins=(join(3),)))
    spans.applied(Command(3, drops=(3,)))  # it never ran
    assert [(name, told["stagemesh.steps"]) for name, _, told in kept.spans] == [("decode", 4)]


async def send(spans: Spans) -> None:
    ids = parse_traceparent(PARENT)
    assert ids is not None
    now_ns = time.monotonic_ns()
    spans.span("decode", request_id_of(ids), now_ns - 5_000_000, now_ns, {"stagemesh.steps": 7})
    spans.root(ids, now_ns - 9_000_000, now_ns, {"stagemesh.outcome": "error"}, error="PeerLost: gone")


def test_spans_reach_a_collector_with_their_parents_and_at_the_right_time() -> None:
    async def run(endpoint: str) -> None:
        async with AsyncExitStack() as stack:
            await send(open_spans(stack, config(endpoint=endpoint), service="decode", process="decode-0/0"))

    began_ns = time.time_ns()
    with collector() as receiver:
        asyncio.run(run(receiver.endpoint))
        child, root = receiver.wait(2)
    assert child.trace_id == root.trace_id == PARENT[3:35]
    assert child.span.parent_span_id == root.span.span_id
    assert root.span.parent_span_id.hex() == PARENT[36:52]
    assert child.service == "stagemesh-decode"
    assert child.attributes == {"stagemesh.steps": 7}
    assert child.span.end_time_unix_nano - child.span.start_time_unix_nano == 5_000_000
    assert began_ns - 1e9 < child.span.end_time_unix_nano < time.time_ns() + 1e9
    assert (root.span.status.code, root.span.status.message) == (2, "PeerLost: gone")


def test_without_a_collector_there_are_none_and_a_wrong_one_is_refused() -> None:
    async def run() -> Spans:
        async with AsyncExitStack() as stack:
            return open_spans(stack, config(), service="router", process="router")

    assert asyncio.run(run()) is NO_SPANS
    with pytest.raises(Rejected, match=r"otel\.endpoint: must start with http://"):
        config(endpoint="127.0.0.1:4317")
