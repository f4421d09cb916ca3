"""A request's spans as the router sees it: the whole, and what it went through one after the other.

arrived --tokenize--> taken --queue--> its ticket is open --first token--> ... --answer--> ended
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stagemesh.shared.obs.otel import Attributes, Spans
from stagemesh.shared.obs.trace_ids import TraceIds, parse_traceparent, trace_of

if TYPE_CHECKING:
    from stagemesh.services.router.record import RequestRecord

NS = 1_000_000_000


def traced(request_id: str, traceparent: str) -> TraceIds:
    """The trace of a new request: its client's, unless that has named the request itself, or no trace."""
    named = None if request_id else parse_traceparent(traceparent)
    return named or trace_of(request_id or secrets.token_hex(16))


def trace_request(spans: Spans, record: RequestRecord, outcome: str, error: BaseException | None) -> None:
    """Exports what there is of a request that has ended now."""
    if record.trace is None:
        return
    end_ns, live = time.monotonic_ns(), record.live
    attributes: Attributes = {"stagemesh.request_id": record.request_id, "stagemesh.outcome": outcome}
    if live is not None:
        attributes["stagemesh.prompt_tokens"] = len(live.token_ids)
        attributes["stagemesh.completion_tokens"] = live.completion_tokens
        attributes["stagemesh.cached_tokens"] = live.cached_tokens
        attributes["stagemesh.attempts"] = live.num_attempts
    for name, start_ns, stop_ns in _parts(record, end_ns):
        spans.span(name, record.request_id, start_ns, stop_ns, {"stagemesh.process": "router"})
    failed = "" if error is None else f"{type(error).__name__}: {error}"
    spans.root(record.trace, round(record.arrived_s * NS), end_ns, attributes, error=failed)


def _parts(record: RequestRecord, end_ns: int) -> Iterator[tuple[str, int, int]]:
    """One after the other, up to where the request came."""
    live, at_ns = record.live, round(record.arrived_s * NS)
    if live is None:
        yield "tokenize", at_ns, end_ns
        return
    first_s = None if live.first_token_s is None else live.started_s + live.first_token_s
    for name, until_s in (("tokenize", live.started_s), ("queue", live.ticket_at_s), ("first token", first_s)):
        until_ns = end_ns if until_s is None else min(max(at_ns, round(until_s * NS)), end_ns)
        yield name, at_ns, until_ns
        if until_s is None:
            return
        at_ns = until_ns
    yield "answer", at_ns, end_ns
