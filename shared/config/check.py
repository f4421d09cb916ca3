"""What must hold between several values of a config. Pure: a config goes in, Rejected comes out or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stagemesh.shared.config.address import Address, check_bus_url, parse_address
from stagemesh.shared.config.exposure import check_exposure
from stagemesh.shared.config.hosts import LOCAL_HOST, host_of, is_wildcard, listen_address, mesh_hosts, stage_hosts
from stagemesh.shared.config.sections import Config, InstanceSection
from stagemesh.shared.errors import Rejected

RESERVED_NAMES: Final = ("admin", "events")
"""A mesh of that name could not be told from the subjects that no stage may use (shared/bus/roles.py)."""


def check_config(config: Config) -> None:
    """Raises Rejected, naming the key, for the first thing that does not fit together.

    Whether `layers` add up to the model's is known only with the model, and checked when it is opened.
    """
    if not config.mesh.run_dir.startswith("/"):
        raise Rejected("mesh.run_dir", f"must be an absolute path, got {config.mesh.run_dir!r}")
    if config.mesh.name in RESERVED_NAMES:
        raise Rejected("mesh.name", f"{config.mesh.name!r} is a word of the bus's subjects; take another name")
    if config.nats.url:
        check_bus_url(config.nats.url, "nats.url")
    _check_addresses(config)
    _check_names(config)
    if config.otel.endpoint and not config.otel.endpoint.startswith(("http://", "https://")):
        raise Rejected("otel.endpoint", f"must start with http:// or https://, got {config.otel.endpoint!r}")
    least, most = config.engine.min_chunk_size, config.engine.chunk_size
    if least is not None and least > most:
        raise Rejected("engine.min_chunk_size", f"must be at most engine.chunk_size, which is {most}; got {least}")
    _check_hosts(config)
    _check_openai(config)
    check_exposure(config, ((field, _listener(config, address)) for field, address in addresses(config)))
    for index, instance in enumerate(config.instances):
        _check_instance(f"instance[{index}]", instance)
    _check_ring(config)


def _check_openai(config: Config) -> None:
    """The gateway shows the router nothing of its clients, and asks them for nothing."""
    if config.openai.port is None:
        return
    for field, is_set in (("auth.keys_file", config.auth.keys_file), ("tls.cert_file", config.tls.is_on)):
        if is_set:
            raise Rejected("openai.port", f"cannot be had with {field}: the gateway has neither keys nor certificates")
    if parse_address(config.router.listen, "router.listen").path:
        raise Rejected("openai.port", "needs a router that listens at host:port (router.listen)")


def _check_hosts(config: Config) -> None:
    """What is on several hosts must be reached from each of them."""
    for field, address in addresses(config):
        if field != "router.listen" and is_wildcard(address):
            raise Rejected(field, f"nobody can connect to {address}: name a host, and mesh.listen_host to listen")
    hosts = mesh_hosts(config)
    if len(hosts) > 1:
        for field, address in addresses(config):
            if field != "router.listen" and host_of(address) == LOCAL_HOST:
                raise Rejected(field, f"{address} cannot be reached from {_named(hosts - {LOCAL_HOST})}")
    for index, instance in enumerate(config.instances):
        if config.model.device == "cuda" and len(stage_hosts(instance)) > 1:
            raise Rejected(
                f"instance[{index}].stages",
                f"activations go from GPU to GPU of one host; {instance.name} is on {_named(stage_hosts(instance))}. "
                "Give each host instances of its own",
            )
    if len(hosts) > 1 and config.transfer.protocol == "intranode":
        raise Rejected("transfer.protocol", f"'intranode' stays in one host; there are {_named(hosts)}")


def _listener(config: Config, address: Address) -> Address:
    return parse_address(listen_address(config, str(address)), "mesh.listen_host")


def _named(hosts: frozenset[str]) -> str:
    return ", ".join(sorted(hosts))


def _check_names(config: Config) -> None:
    for role in ("prefill", "decode"):
        if not config.of_role(role):
            raise Rejected("instance", f"at least one instance of role {role} is needed")
    names = [instance.name for instance in config.instances]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Rejected(f"instance[{index}].name", f"{name!r} is the name of an earlier instance")


def _check_ring(config: Config) -> None:
    """A slot is used again once its step is back, so there must be one for each that may be out; an instance may come
    to decode whatever it does now."""
    engine, longest = config.engine, max(instance.pp_size for instance in config.instances)
    least = longest + engine.extra_depth + engine.run_ahead
    if engine.ring_slots is not None and engine.ring_slots < least:
        raise Rejected(
            "engine.ring_slots",
            f"must be at least {least}, for {longest} stages, engine.extra_depth {engine.extra_depth} and "
            f"engine.run_ahead {engine.run_ahead}; got {engine.ring_slots}",
        )


def _check_instance(field: str, instance: InstanceSection) -> None:
    if len(instance.stages) != instance.pp_size:
        raise Rejected(
            f"{field}.stages",
            f"{instance.name} needs one address a stage: pp_size is {instance.pp_size}, got {len(instance.stages)}",
        )
    if instance.gpus and len(instance.gpus) != instance.pp_size:
        raise Rejected(
            f"{field}.gpus",
            f"{instance.name} needs one GPU a stage: pp_size is {instance.pp_size}, got {list(instance.gpus)}",
        )
    if instance.layers and len(instance.layers) != instance.pp_size:
        raise Rejected(
            f"{field}.layers",
            f"{instance.name} needs one count a stage: pp_size is {instance.pp_size}, got {list(instance.layers)}",
        )


def addresses(config: Config) -> Iterator[tuple[str, Address]]:
    """Every address of the deployment, with its key. Raises Rejected for one that is none."""
    for field, text in (("router.listen", config.router.listen), ("broker.listen", config.broker.listen)):
        yield field, parse_address(text, field)
    for index, instance in enumerate(config.instances):
        for rank, text in enumerate(instance.stages):
            field = f"instance[{index}].stages[{rank}]"
            yield field, parse_address(text, field)


def _check_addresses(config: Config) -> None:
    taken: dict[Address, str] = {}
    for field, address in addresses(config):
        if not address.path and address.port == 0 and field != "router.listen":
            raise Rejected(field, "port 0 is for the router alone: others must know this port beforehand")
        if address in taken:
            raise Rejected(field, f"{address} is already the address of {taken[address]}")
        taken[address] = field
