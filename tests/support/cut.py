"""Cuts the connections of another process: its sockets are taken by pidfd_getfd and shut down, both ways. Needs the
rights of a debugger over it, which root and, mostly, a parent has."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PIDFD_GETFD: Final = 438  # the same number on all architectures
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

Peer = str | tuple[str, int]
"""A path of a unix socket, or host and port."""


def cut(pid: int, wanted: Callable[[Peer], bool]) -> int:
    """Shuts down every connection of the process to a peer that is `wanted`, and returns how many."""
    count = 0
    for connection in _connections(pid):
        try:
            peer = connection.getpeername()
        except OSError:  # it listens, or is over
            continue
        name = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else _path(peer)
        if wanted(name):
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def tcp_ports(pid: int) -> frozenset[int]:
    """Those at which the process listens or talks."""
    names = [connection.getsockname() for connection in _connections(pid)]
    return frozenset(int(name[1]) for name in names if isinstance(name, tuple))


def _path(peer: str | bytes) -> str:
    return peer.decode(errors="replace") if isinstance(peer, bytes) else peer


def _connections(pid: int) -> Iterator[socket.socket]:
    with _pidfd(pid) as pidfd:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if not _target(link).startswith("socket:"):
                continue
            copy = _LIBC.syscall(PIDFD_GETFD, pidfd, int(link.name), 0)
            if copy < 0:
                if ctypes.get_errno() == 9:  # EBADF: closed meanwhile
                    continue
                raise OSError(ctypes.get_errno(), f"no rights over the sockets of process {pid}")
            with socket.socket(fileno=copy) as connection:
                yield connection


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
