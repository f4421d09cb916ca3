"""What can be said about this host before any process of a deployment starts: what is installed, which ports are
free."""

from __future__ import annotations

import errno
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stagemesh.shared.config import Address, Config, parse_address
from stagemesh.shared.config.check import addresses
from stagemesh.shared.config.hosts import LOOPBACK, listen_address
from stagemesh.shared.errors import Rejected

FREE, IN_USE, ELSEWHERE = "free", "in use", "elsewhere"
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
    places = [(field, parse_address(listen_address(config, str(at)), field)) for field, at in addresses(config)]
    if config.openai.port is not None:
        places.append(("openai.port", Address(LOOPBACK, config.openai.port)))
    for field, address in places:
        if not address.path and port_state(address) == IN_USE:
            raise Rejected(field, f"cannot listen on {address}: {os.strerror(errno.EADDRINUSE)}")


def port_state(address: Address) -> str:
    """FREE, IN_USE, ELSEWHERE, or what is wrong with the address."""
    if address.path:
        return IN_USE if Path(address.path).exists() else FREE
    try:
        found = socket.getaddrinfo(address.host.strip("[]"), address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"cannot be resolved ({error})"
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            states = {errno.EADDRINUSE: IN_USE, errno.EADDRNOTAVAIL: ELSEWHERE}
            return states.get(error.errno or 0, error.strerror or str(error))
    return FREE
