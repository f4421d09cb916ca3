"""An OpenTelemetry collector for tests: a real OTLP receiver over gRPC that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Received:
    """A span, with what its process says of itself."""

    span: Span
    service: str

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in self.span.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` are all that have come so far."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.endpoint = ""
        self._came = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._came:
            for group in request.resource_spans:
                told = {pair.key: pair.value.string_value for pair in group.resource.attributes}
                for scope in group.scope_spans:
                    self.spans += [Received(span, told["service.name"]) for span in scope.spans]
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, count: int) -> list[Received]:
        """Once there are so many spans."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.spans) >= count, LIMIT_S), [s.span.name for s in self.spans]
            return list(self.spans)


@contextmanager
def collector() -> Iterator[Collector]:
    """Listens on a free port of loopback."""
    server = grpc.server(ThreadPoolExecutor(2))
    receiver = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
