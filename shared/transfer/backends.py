"""The backend that a config asks for."""

from __future__ import annotations

import socket

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import Rejected
from stagemesh.shared.transfer.base import Endpoint


def open_endpoint(section: TransferSection) -> Endpoint:
    """This process's endpoint. Raises Rejected for a backend that does not work between processes, or is not there."""
    if section.backend != "mooncake":
        raise Rejected("transfer.backend", f"{section.backend!r} does not work between processes; use 'mooncake'")
    try:
        socket.getaddrinfo(section.host, None)
    except OSError as error:
        raise Rejected("transfer.host", f"{section.host!r} cannot be resolved: {error}") from None
    from stagemesh.shared.transfer.mooncake import MooncakeEndpoint, MooncakeSettings

    return MooncakeEndpoint(
        MooncakeSettings(
            host=section.host,
            max_batch_bytes=section.max_batch_bytes,
            max_batch_pieces=section.max_batch_pieces,
            num_bulk_threads=section.io_threads,
        )
    )
