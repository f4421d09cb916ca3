"""The gateway that speaks OpenAI's HTTP in front of the router: where it listens, and how it is started. Pure, but for
which ports are free.

It serves one router, which knows better than it whom to refuse, and when: what a gateway does about several workers,
some of them ill, is switched off.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stagemesh.shared.config import Config, parse_address
from stagemesh.shared.config.hosts import LOOPBACK, is_wildcard
from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime.plan import ProcessSpec

NAME: Final = "openai"
NEVER_S: Final = 1_000_000_000
JSON_GROWTH: Final = 6  # bytes of JSON for one of text, at most
OVERHEAD_BYTES: Final = 1 << 20  # of a body: schemas, tools
ROOM: Final = 2  # requests for one that may be live: the router says why there is no room, so they should reach it


@dataclass(frozen=True, slots=True)
class GatewayPlace:
    """On this host. `router` is host:port; `model` what clients call it."""

    port: int
    metrics_host: str
    metrics_port: int
    router: str
    model: str

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def metrics(self) -> str:
        return f"{self.metrics_host}:{self.metrics_port}"


def gateway_process(config: Config) -> ProcessSpec | None:
    """None where the config has none."""
    port = config.openai.port
    return None if port is None else ProcessSpec(NAME, "openai", None, None, f"{LOOPBACK}:{port}")


def gateway_place(config: Config) -> GatewayPlace:
    """With free ports where the config leaves them open. Raises Rejected."""
    if config.openai.port is None:
        raise Rejected("openai.port", "is not set: no OpenAI server is asked for")
    router = parse_address(config.router.listen, "router.listen")
    if not router.port:
        raise Rejected(
            "router.listen", "port 0 is for `stagemesh up`: the OpenAI server must know this port beforehand"
        )
    host = LOOPBACK if is_wildcard(router) else router.host
    port = usable_port(config.openai.port, LOOPBACK, "openai.port")
    # it cannot do without
    metrics_host = config.metrics.host if config.metrics.enabled else LOOPBACK
    metrics_port = usable_port(config.metrics.port, metrics_host, "metrics.port")
    return GatewayPlace(port, metrics_host, metrics_port, f"{host}:{router.port}", config.model.served_name)


def usable_port(port: int, host: str, field: str) -> int:
    """`port`, or any that is free for 0. Raises Rejected if somebody has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise Rejected(field, f"cannot listen on {host}:{port}: {error.strerror}") from None
        found: int = probe.getsockname()[1]
        return found


def gateway_arguments(config: Config, place: GatewayPlace) -> Sequence[str]:
    """Of `smg launch`."""
    body = JSON_GROWTH * config.router.max_text_bytes + OVERHEAD_BYTES
    options = {
        "host": LOOPBACK,
        "port": place.port,
        "worker-urls": f"grpc://{place.router}",
        "policy": "round_robin",
        "prometheus-host": place.metrics_host,  # its default is every interface
        "prometheus-port": place.metrics_port,
        "shutdown-grace-period-secs": math.ceil(config.engine.drain_timeout_s),
        "max-payload-size": body,
        "max-concurrent-requests": ROOM * config.router.max_live_requests,
        "queue-size": 0,
        # a router whose prompts take long is not ill
        "worker-wedge-secs": NEVER_S,
        # a router that was started again is taken back within a second
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 1,
        "health-success-threshold": 1,
        "history-memory-max-responses": 1000,
        "log-level": "error",  # what its clients do wrong is told to them
    }
    flags = (
        "disable-retries",
        "disable-circuit-breaker",
        "disable-worker-overload-protection",
        "disable-load-monitoring",
        "no-remove-unhealthy-workers",
        "log-json",
    )
    pairs = (part for name, value in options.items() for part in (f"--{name}", str(value)))
    return [*pairs, *(f"--{flag}" for flag in flags)]
