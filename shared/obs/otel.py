"""Spans of requests, sent to an OpenTelemetry collector by OTLP. The only module that knows its libraries.

span --> a bounded queue --> a thread of the library's, in batches --> the collector; what does not fit is dropped

Nothing of a trace travels between our processes: a request's trace follows from its id (`trace_of`), which all have.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Protocol

from stagemesh.shared.config import Config
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.trace_ids import TraceIds, is_sampled, trace_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

MAX_QUEUED: Final = 8192  # spans of some hundred requests
MAX_BATCH: Final = 512
EXPORT_TIMEOUT_S: Final = 5.0
Attributes = dict[str, str | int | float]


class Spans(Protocol):
    """Where spans of requests go. Times are CLOCK_MONOTONIC in nanoseconds."""

    @property
    def enabled(self) -> bool:
        """False: nobody wants them, and they need not be made."""
        ...

    def span(self, name: str, request_id: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """A part of a request."""
        ...

    def root(self, ids: TraceIds, start_ns: int, end_ns: int, attributes: Attributes, *, error: str = "") -> None:
        """The whole request, once."""
        ...


class NoSpans:
    """Without a collector."""

    enabled: bool = False

    def span(self, name: str, request_id: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """Dropped."""

    def root(self, ids: TraceIds, start_ns: int, end_ns: int, attributes: Attributes, *, error: str = "") -> None:
        """Dropped."""


NO_SPANS: Final = NoSpans()


class OtlpSpans:
    """Owns the queue and its thread."""

    enabled: bool = True

    def __init__(self, endpoint: str, sample_ratio: float, service: str, process: str, mesh: str) -> None:
        """Raises Rejected if the libraries are not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise Rejected("otel.endpoint", f"needs stagemesh[otel] ({error})") from None
        self._resource = Resource(
            {"service.name": f"stagemesh-{service}", "service.instance.id": process, "stagemesh.mesh": mesh}
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor: BatchSpanProcessor = BatchSpanProcessor(
            exporter, max_queue_size=MAX_QUEUED, max_export_batch_size=MAX_BATCH
        )
        self._sample_ratio = sample_ratio
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def span(self, name: str, request_id: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        ids = trace_of(request_id)
        self._export(name, ids, (ids.new_span(), ids.span_id), (start_ns, end_ns), attributes)

    def root(self, ids: TraceIds, start_ns: int, end_ns: int, attributes: Attributes, *, error: str = "") -> None:
        own = (ids.span_id, ids.parent_id)
        self._export("request", ids, own, (start_ns, end_ns), attributes, error=error, kind="SERVER")

    def _export(
        self,
        name: str,
        ids: TraceIds,
        span_and_parent: tuple[int, int],
        times_ns: tuple[int, int],
        attributes: Attributes,
        *,
        error: str = "",
        kind: str = "INTERNAL",
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        if not is_sampled(ids.trace_id, self._sample_ratio):
            return
        flags = TraceFlags(TraceFlags.SAMPLED)
        context, parent = (
            SpanContext(ids.trace_id, span, is_remote=False, trace_flags=flags) for span in span_and_parent
        )
        self._processor.on_end(
            ReadableSpan(
                name,
                context=context,
                parent=parent if parent.span_id else None,
                resource=self._resource,
                attributes=attributes,
                kind=SpanKind[kind],
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.OK),
                start_time=times_ns[0] + self._offset_ns,
                end_time=times_ns[1] + self._offset_ns,
            )
        )

    def close(self) -> None:
        """Sends what is queued, for EXPORT_TIMEOUT_S at most. Blocks."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def open_spans(stack: AsyncExitStack, config: Config, *, service: str, process: str) -> Spans:
    """Until `stack` is closed. Raises Rejected if the libraries are not installed."""
    section = config.otel
    if not section.endpoint:
        return NO_SPANS
    spans = OtlpSpans(section.endpoint, section.sample_ratio, service, process, config.mesh.name)
    stack.push_async_callback(asyncio.to_thread, spans.close)
    return spans
