"""The backend that a config asks for."""

from __future__ import annotations

import socket
from typing import Final

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.transfer.base import Endpoint

INTRANODE_BATCH_BYTES: Final = 256 << 20  # copied in less than a millisecond
NIXL_MAX_BATCH_BYTES: Final = 4 << 20  # of host memory: an urgent write waits while a batch is copied


def choose_protocol(section: TransferSection, device: str) -> str:
    """How the engine moves bytes, `tcp`, `intranode` or `rdma`. Raises Rejected where the memory does not allow it."""
    if section.protocol == "intranode" and device != "cuda":
        raise Rejected("transfer.protocol", "'intranode' moves GPU memory only; model.device is 'cpu'")
    if section.protocol != "auto":
        return section.protocol
    return "intranode" if device == "cuda" else "tcp"


def open_endpoint(section: TransferSection, device: str, log: Log) -> Endpoint:
    """This process's endpoint for memory on `device`. Raises Rejected for a backend that does not work between
    processes, or is not there."""
    if section.backend == "memory":
        raise Rejected("transfer.backend", "'memory' does not work between processes; use 'mooncake' or 'nixl'")
    try:
        socket.getaddrinfo(section.host, None)
    except OSError as error:
        raise Rejected("transfer.host", f"{section.host!r} cannot be resolved: {error}") from None
    return open_nixl(section, device, log) if section.backend == "nixl" else open_mooncake(section, device, log)


def open_mooncake(section: TransferSection, device: str, log: Log) -> Endpoint:
    from stagemesh.shared.transfer.mooncake import MooncakeEndpoint, MooncakeSettings

    protocol = choose_protocol(section, device)
    least = INTRANODE_BATCH_BYTES if protocol == "intranode" else 0
    log.info("transfer", backend=section.backend, protocol=protocol)
    return MooncakeEndpoint(
        MooncakeSettings(
            host=section.host,
            protocol=protocol,
            max_batch_bytes=max(section.max_batch_bytes, least),
            max_batch_pieces=section.max_batch_pieces,
            num_bulk_threads=section.io_threads,
        )
    )


def open_nixl(section: TransferSection, device: str, log: Log) -> Endpoint:
    from stagemesh.shared.transfer.nixl import NixlEndpoint, NixlSettings

    if device == "cpu":
        max_batch_bytes = min(section.max_batch_bytes, NIXL_MAX_BATCH_BYTES)
    else:
        max_batch_bytes = section.max_batch_bytes if section.protocol == "tcp" else INTRANODE_BATCH_BYTES
    settings = NixlSettings(
        host=section.host,
        device=device,
        protocol=section.protocol,
        max_batch_bytes=max_batch_bytes,
        max_batch_pieces=section.max_batch_pieces,
        num_bulk_threads=section.io_threads,
    )
    log.info("transfer", backend=section.backend, protocol=settings.protocol)
    return NixlEndpoint(settings)
