"""What a process did, as spans in a bounded ring: for `stagemesh trace`, and to see what overlapped with what."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

from stagemesh.shared.obs.request_spans import NO_REQUEST_SPANS, RequestSpans


class Tracer:
    """Keeps the last `capacity` spans. Times are CLOCK_MONOTONIC in nanoseconds, so the processes of one host agree.
    `requests` are the spans of a stage's requests, for a collector; who starts it sets them, if there is one."""

    def __init__(self, process: str, capacity: int = 20_000) -> None:
        self.process = process
        self.requests: RequestSpans = NO_REQUEST_SPANS
        self._spans: deque[dict[str, Any]] = deque(maxlen=capacity)

    def span(self, name: str, start_ns: int, end_ns: int | None = None, **attributes: Any) -> None:
        """Something that took from `start_ns` until `end_ns` (now, if absent)."""
        end_ns = time.monotonic_ns() if end_ns is None else end_ns
        self._spans.append({"name": name, "start_ns": start_ns, "end_ns": end_ns, **attributes})

    def mark(self, name: str, **attributes: Any) -> None:
        """Something that happened now."""
        self.span(name, time.monotonic_ns(), **attributes)

    def dump(self) -> bytes:
        """A JSON array of all spans, oldest first, each with the name of the process."""
        return json.dumps([{"process": self.process, **span} for span in self._spans]).encode()
