"""The backend that a config asks for."""

from __future__ import annotations

import socket
from dataclasses import asdict

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.transfer.base import Endpoint
from stagemesh.shared.transfer.capabilities import KNOWN, choose_protocol


def open_endpoint(section: TransferSection, device: str, log: Log, *, one_host: bool = True) -> Endpoint:
    """This process's endpoint for memory on `device`. Raises Rejected where the backend cannot do what is asked for."""
    protocol = choose_protocol(section, device, one_host=one_host)
    try:
        socket.getaddrinfo(section.host, None)
    except OSError as error:
        raise Rejected("transfer.host", f"{section.host!r} cannot be resolved: {error}") from None
    known = KNOWN[section.backend, device, protocol]
    log.info("transfer", backend=section.backend, protocol=protocol, host=section.host, **asdict(known))
    make = open_nixl if section.backend == "nixl" else open_mooncake
    return make(section, device, protocol, known.batch_bytes(section.max_batch_bytes))


def open_mooncake(section: TransferSection, device: str, protocol: str, max_batch_bytes: int) -> Endpoint:
    from stagemesh.shared.transfer.mooncake import MooncakeEndpoint, MooncakeSettings

    return MooncakeEndpoint(
        MooncakeSettings(
            host=section.host,
            protocol=protocol,
            max_batch_bytes=max_batch_bytes,
            max_batch_pieces=section.max_batch_pieces,
            num_bulk_threads=section.io_threads,
            private_network=section.private_network,
        )
    )


def open_nixl(section: TransferSection, device: str, protocol: str, max_batch_bytes: int) -> Endpoint:
    from stagemesh.shared.transfer.nixl import NixlEndpoint, NixlSettings

    return NixlEndpoint(
        NixlSettings(
            host=section.host,
            device=device,
            protocol=protocol,
            max_batch_bytes=max_batch_bytes,
            max_batch_pieces=section.max_batch_pieces,
            num_bulk_threads=section.io_threads,
        )
    )
