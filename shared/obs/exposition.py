"""The samples of a process as Prometheus reads them, and the HTTP server that it reads them from."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.metrics import PREFIX, Identity, Kind, Metric, Sample
from stagemesh.shared.obs.tally import INFINITY, Distribution

SILENT_S: Final = 10.0
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: dict[Kind, type[Family]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class Exposition(Collector):
    """Samples are replaced as a whole: a scrape, on whatever thread, sees those of one moment."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._samples: tuple[Sample, ...] = ()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def publish(self, samples: Iterable[Sample]) -> None:
        self._samples = tuple(samples)

    def collect(self) -> Iterator[Family]:
        families: dict[Metric, Family] = {}
        for sample in self._samples:
            metric = sample.metric
            if metric not in families:
                labels = (*metric.scope.value, *metric.labels)
                families[metric] = _FAMILIES[metric.kind](PREFIX + metric.name, metric.help, labels=labels)
            _add(families[metric], (*self.identity.values(metric.scope), *sample.labels), sample.value)
        yield from families.values()


def _add(family: Family, labels: tuple[str, ...], value: float | Distribution) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Distribution)
        buckets = [("+Inf" if bound == INFINITY else str(float(bound)), count) for bound, count in value.buckets]
        family.add_metric(labels, buckets, value.total)
    else:
        assert not isinstance(value, Distribution)
        family.add_metric(labels, value)


async def serve_metrics(stack: AsyncExitStack, registry: CollectorRegistry, host: str, port: int) -> str:
    """Serves `registry` at /metrics until `stack` is closed; the address, with its port if 0 was asked for.

    Raises Rejected if the port is taken or the host is not ours.
    """
    try:  # the standard library looks the host's name up when it binds
        server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    except OSError as error:
        raise Rejected("metrics.port", f"cannot listen on {host}:{port}: {error.strerror}") from error
    server.RequestHandlerClass = _impatient(server.RequestHandlerClass)
    stack.push_async_callback(asyncio.to_thread, _stop, server, thread)
    return f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"


def _impatient(handler: Any) -> Any:
    """Each connection has a thread: one that says nothing, or takes nothing, has it for SILENT_S."""

    class Impatient(handler):  # type: ignore[misc]
        timeout = SILENT_S

        def handle(self) -> None:
            with suppress(OSError):  # a TimeoutError, or a client that has gone: nobody is left to be told
                super().handle()

    return Impatient


def _stop(server: WSGIServer, thread: threading.Thread) -> None:
    server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would look for the shutdown twice a second
    server.shutdown()
    server.server_close()
    thread.join()
