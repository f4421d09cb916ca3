"""A deployment over several hosts: which host a process is on, where it listens, and what its peers are told. Pure.

A host is what the config calls it in an address; unix sockets and loopback are this host. Every address in the config
is the one that others connect to; a process listens there too, but for `mesh.listen_host`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stagemesh.shared.config.address import Address, parse_address
from stagemesh.shared.config.sections import Config, InstanceSection, TransferSection

LOCAL_HOST: Final = "this host"
LOOPBACK: Final = "127.0.0.1"
LOOPBACKS: Final = frozenset({LOOPBACK, "localhost", "[::1]"})  # but 127.0.0.2 stands for another host, in trials
WILDCARDS: Final = frozenset({"0.0.0.0", "[::]"})


def listen_address(config: Config, text: str) -> str:
    """Where the process whose address is `text` listens: `mesh.listen_host`, if there is one, at the same port. The
    router's address is nobody's to be told."""
    address = parse_address(text, "listen")
    if address.path or not config.mesh.listen_host or text == config.router.listen:
        return text
    return f"{config.mesh.listen_host}:{address.port}"


def stage_hosts(instance: InstanceSection) -> frozenset[str]:
    return frozenset(_host(text) for text in instance.stages)


def mesh_hosts(config: Config) -> frozenset[str]:
    """Of every stage."""
    return frozenset(host for instance in config.instances for host in stage_hosts(instance))


def stages_beside(config: Config, address: str) -> int:
    """How many stages share the host of the stage at `address`, itself included."""
    here = _host(address)
    return sum(_host(text) == here for instance in config.instances for text in instance.stages)


def stage_threads(config: Config, address: str, num_cores: int) -> int:
    """Torch threads of the stage at `address`, on a host of `num_cores`."""
    return config.engine.threads or max(1, num_cores // stages_beside(config, address))


def stage_transfer(config: Config, address: str) -> TransferSection:
    """The transfer settings of the stage at `address`: peers are told the same host as for its commands, unless the
    config says otherwise."""
    if config.transfer.host:
        return config.transfer
    host = host_of(parse_address(address, "stages"))
    return msgspec.structs.replace(config.transfer, host=LOOPBACK if host == LOCAL_HOST else host.strip("[]"))


def transfer_hosts(config: Config) -> frozenset[str]:
    """What the transfer engines of all stages tell their peers."""
    stages = (text for instance in config.instances for text in instance.stages)
    return frozenset(stage_transfer(config, text).host for text in stages)


def is_wildcard(address: Address) -> bool:
    return address.host in WILDCARDS


def host_of(address: Address) -> str:
    return LOCAL_HOST if address.path or address.host in LOOPBACKS else address.host


def _host(text: str) -> str:
    return host_of(parse_address(text, "stages"))
