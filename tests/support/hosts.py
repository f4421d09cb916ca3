"""Hosts of a network of their own: a network namespace each, joined by a bridge. For root, with Debian's iproute2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


class Network:
    """`addresses` are hosts of one /24. What runs in one reaches the others, and nothing else."""

    def __init__(self, stack: ExitStack, addresses: Sequence[str]) -> None:
        self._prefix = f"sm{os.getpid()}"
        switch = self._add(stack, "sw")
        _ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "dev", "bridge0", "up")
        for index, address in enumerate(addresses):
            host, port = self._add(stack, address), f"port{index}"
            _ip("-n", switch, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")

    def on(self, address: str) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self._name(address)]

    def _name(self, address: str) -> str:
        return f"{self._prefix}-{address}"

    def _add(self, stack: ExitStack, address: str) -> str:
        name = self._name(address)
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        return name


@contextmanager
def network(addresses: Sequence[str]) -> Iterator[Network]:
    """Gone at the end, with what would still run in it disconnected."""
    with ExitStack() as stack:
        yield Network(stack, addresses)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
