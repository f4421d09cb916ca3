"""Addresses as the config writes them: `unix:/path`, `host:port`, and the URL of the bus."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from stagemesh.shared.errors import Rejected

MAX_UNIX_PATH_BYTES = 100  # the kernel takes 107; some is left for a suffix
_HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Either `path` (a unix socket) or `host` and `port`; the other is empty."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_private(self) -> bool:
        """Nobody reaches it from another host."""
        return bool(self.path) or is_loopback(self.host)

    def __str__(self) -> str:
        """The form that gRPC takes as a target and as a listen address."""
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


def parse_address(text: str, field: str) -> Address:
    """The address, or Rejected naming `field`. Port 0 is taken here; only a listener may have it."""
    if text.startswith("unix:"):
        return Address(path=_unix_path(text.removeprefix("unix:"), field))
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise Rejected(field, f"expected unix:/path or host:port, got {text!r}")
    port = int(match["port"])
    if port > 65535:
        raise Rejected(field, f"a port is at most 65535, got {port}")
    return Address(host=match["host"], port=port)


def check_bus_url(url: str, field: str) -> None:
    """Raises Rejected for what is no address of a NATS server."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, say
        is_one = False
    if not is_one:
        raise Rejected(field, f"expected nats://host:port or tls://host:port, got {url!r}")


def is_loopback(host: str) -> bool:
    """Of a host as addresses have it. A name but for localhost is not: what it stands for is not known here."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _unix_path(path: str, field: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise Rejected(field, f"a unix socket needs an absolute path, got {path!r}")
    length = len(path.encode())
    if length > MAX_UNIX_PATH_BYTES:
        raise Rejected(field, f"a unix socket path is at most {MAX_UNIX_PATH_BYTES} bytes, got {length}: {path!r}")
    return path
