"""Whether anything listens at a peer's address."""

from __future__ import annotations

import socket

from stagemesh.shared.errors import PeerLost


def connect(host: str, port: int, timeout_s: float) -> None:
    """Raises PeerLost if nothing accepts connections there. Nothing is sent."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise PeerLost(f"transfer endpoint {host}:{port} cannot be reached: {error}") from error
