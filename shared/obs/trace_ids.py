"""A request's trace, from its id alone: no process has to tell another. Pure.

traceparent of the client --> request id "<trace>-<span>" --> the same trace in every process
no traceparent            --> any id                      --> trace and root span are a hash of it

The root span is the router's; every other span is its child.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_OURS: Final = re.compile(r"(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})")
SPAN_BITS: Final = 64
SAMPLED_BITS: Final = (1 << 56) - 1  # of a trace id that W3C has random


@dataclass(frozen=True, slots=True)
class TraceIds:
    """`span_id` is the request's own span, `parent_id` the client's; 0 where there is none."""

    trace_id: int
    span_id: int
    parent_id: int = 0

    def new_span(self) -> int:
        return secrets.randbits(SPAN_BITS) or 1


def trace_of(request_id: str) -> TraceIds:
    """The trace of a request, in whatever process."""
    if (ours := _OURS.fullmatch(request_id)) is not None and int(ours["trace"], 16) and int(ours["span"], 16):
        return TraceIds(int(ours["trace"], 16), int(ours["span"], 16))
    digest = hashlib.blake2b(request_id.encode(), digest_size=24).digest()
    return TraceIds(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1)


def parse_traceparent(header: str) -> TraceIds | None:
    """The client's span, as `trace_id` and `parent_id`, with a new span of ours below it; None for what is no such
    header (https://www.w3.org/TR/trace-context/)."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None or header.startswith("ff") or not (int(match["trace"], 16) and int(match["span"], 16)):
        return None
    ids = TraceIds(int(match["trace"], 16), 0, int(match["span"], 16))
    return TraceIds(ids.trace_id, ids.new_span(), ids.parent_id)


def request_id_of(ids: TraceIds) -> str:
    """The id that a request gets whose client named a trace, but no id."""
    return f"{ids.trace_id:032x}-{ids.span_id:016x}"


def is_sampled(trace_id: int, ratio: float) -> bool:
    """The same answer in every process."""
    return (trace_id & SAMPLED_BITS) < ratio * (SAMPLED_BITS + 1)
