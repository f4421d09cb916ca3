"""What can be said about this host before any process of a deployment starts: what is installed, which ports are
free."""

from __future__ import annotations

import errno
import os
import socket
from importlib.util import find_spec
from typing import Final

from stagemesh.shared.config import Address, Config, parse_address
from stagemesh.shared.config.check import addresses
from stagemesh.shared.config.hosts import LOOPBACK, listen_address
from stagemesh.shared.errors import Rejected

GATEWAY: Final = ("smg", "smg_grpc_proto")
ENGINES: Final = {"mooncake": ("mooncake", "cpu] or [cu13"), "nixl": ("nixl", "nixl")}
"""The package of each transfer backend, and the extra that brings it."""


def check_gateway(config: Config) -> None:
    """Raises Rejected, saying what to install, if a gateway is asked for that is not there."""
    missing = [name for name in GATEWAY if find_spec(name) is None]
    if config.openai.port is not None and missing:
        raise Rejected("openai.port", f"needs {' and '.join(missing)}: pip install 'stagemesh[openai]'")


def check_engine(config: Config) -> None:
    """The same of the transfer engine, which stages need."""
    package, extra = ENGINES.get(config.transfer.backend, ("", ""))
    if package and find_spec(package) is None:
        raise Rejected("transfer.backend", f"{package} is not installed: stagemesh[{extra}] brings it")


def check_ports(config: Config) -> None:
    """Of all processes, which are to run here. Raises Rejected, naming the key, if somebody listens there."""
    if config.openai.port is not None:
        usable_port(config.openai.port, LOOPBACK, "openai.port")
    for field, address in addresses(config):
        listening = parse_address(listen_address(config, str(address)), field)
        if not address.path and _is_taken(listening):
            raise Rejected(field, f"cannot listen on {listening}: {os.strerror(errno.EADDRINUSE)}")


def usable_port(port: int, host: str, field: str) -> int:
    """`port`, or any that is free for 0. Raises Rejected if somebody has it."""
    with socket.socket(_family(host)) as probe:
        try:
            _bind(probe, host, port)
        except OSError as error:
            raise Rejected(field, f"cannot listen on {host}:{port}: {error.strerror}") from None
        found: int = probe.getsockname()[1]
        return found


def _is_taken(address: Address) -> bool:
    """What else may be wrong with it is for the process itself to say."""
    with socket.socket(_family(address.host)) as probe:
        try:
            _bind(probe, address.host, address.port)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bind(probe: socket.socket, host: str, port: int) -> None:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((host.strip("[]"), port))
