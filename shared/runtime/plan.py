"""Which processes a deployment has on one machine, and in which order they stop. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal

from stagemesh.shared.config import Config
from stagemesh.shared.errors import Rejected

ServiceName = Literal["openai", "router", "prefill", "decode", "broker", "nats"]
Entry = Callable[[Config, str | None, int | None], None]
"""Runs a service of (config, instance, pp_rank) until it is told to stop."""

ENTRIES: Final[Mapping[str, str]] = {
    "router": "stagemesh.services.router.service:run",
    "prefill": "stagemesh.services.prefill.service:run",
    "decode": "stagemesh.services.decode.service:run",
    "broker": "stagemesh.services.broker.service:run",
    "openai": "stagemesh.shared.runtime.gateway_service:run",
}
"""By name, since nothing under `shared` imports a service."""

STOP_ORDER: Final[Mapping[ServiceName, int]] = {
    "openai": 0,
    "router": 1,
    "prefill": 2,
    "decode": 2,
    "broker": 3,
    "nats": 4,
}
"""Those who take work from others stop before those others; the same number means at once."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. `name` is unique: `router`, `decode-0/1`. `address` is where it listens, as the config has it."""

    name: str
    service: ServiceName
    instance: str | None
    pp_rank: int | None
    address: str


def service_processes(config: Config) -> tuple[ProcessSpec, ...]:
    """All processes but the NATS server and the gateway, in the order they are started."""
    stages = tuple(
        ProcessSpec(f"{instance.name}/{rank}", instance.role, instance.name, rank, address)
        for instance in config.instances
        for rank, address in enumerate(instance.stages)
    )
    broker = ProcessSpec("broker", "broker", None, None, config.broker.listen)
    router = ProcessSpec("router", "router", None, None, config.router.listen)
    return (broker, *stages, router)


def find_process(config: Config, service: ServiceName, instance: str | None, pp_rank: int | None) -> ProcessSpec:
    """The process that is asked for by name. Raises Rejected, naming what there is."""
    if instance is not None and config.instance(instance).role != service:
        raise Rejected("instance", f"{instance} is a {config.instance(instance).role} instance, not {service}")
    found = [spec for spec in service_processes(config) if spec.service == service]
    for spec in found:
        if (spec.instance, spec.pp_rank) == (instance, pp_rank):
            return spec
    raise Rejected("rank", f"no stage {pp_rank} of {instance}; there are {', '.join(spec.name for spec in found)}")


def parse_stage(text: str) -> tuple[str, int]:
    """Instance and rank of `decode-0:1`, as the unit of a stage is named. Raises Rejected."""
    instance, separator, rank = text.rpartition(":")
    if not (separator and instance and rank.isdecimal()):
        raise Rejected("stage", f"expected instance:rank, such as decode-0:1; got {text!r}")
    return instance, int(rank)


def run_entry(target: str, config: Config, instance: str | None, pp_rank: int | None) -> None:
    """Runs the service that `module:name` names, in this process, until it is told to stop."""
    if config.tls.is_on:  # whose handshake a server has refused, and why, is known to the library alone
        os.environ.setdefault("GRPC_VERBOSITY", "INFO")
    load_entry(target)(config, instance, pp_rank)


def load_entry(target: str) -> Entry:
    """The function that `module:name` names; importing the module is this process's first use of it."""
    module, _, name = target.partition(":")
    entry: Entry = getattr(import_module(module), name)
    return entry
