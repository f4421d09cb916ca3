"""The listening sockets of this process, and how to confine those of a library to loopback.

The transfer engine binds its two listeners (handshake, data) to every interface and has no setting for it. A socket
filter does what the missing bind would: the kernel drops, before a connection exists, every packet that was not sent
to 127.0.0.0/8. Connections that a filtered listener accepts inherit the filter.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from stagemesh.shared.errors import Bug, Rejected

NOT_ALLOWED: Final = (
    "this kernel lets nobody filter a socket without CAP_NET_ADMIN. Once no other host reaches the transfer engine's "
    "ports (a firewall, or IPAddressAllow=localhost of a unit), set transfer.private_network = true"
)
SO_ATTACH_FILTER: Final = 26  # linux/asm-generic/socket.h; the socket module does not name it

# Classic BPF, linux/filter.h: (code, jump if true, jump if false, operand), with offsets relative to the network
# header and to the packet's ancillary data.
_NETWORK: Final = 0xFFF00000
_ANCILLARY: Final = 0xFFFFF000
_LOAD_HALF, _LOAD_WORD, _AND, _JUMP_EQUAL, _RETURN = 0x28, 0x20, 0x54, 0x15, 0x06
_ETHERTYPE_IPV4: Final = 0x0800
_IPV4_DESTINATION: Final = 16  # bytes into the header
_LOOPBACK_ONLY: Final = (
    (_LOAD_HALF, 0, 0, _ANCILLARY),
    (_JUMP_EQUAL, 0, 4, _ETHERTYPE_IPV4),
    (_LOAD_WORD, 0, 0, _NETWORK + _IPV4_DESTINATION),
    (_AND, 0, 0, 0xFF000000),
    (_JUMP_EQUAL, 0, 1, 0x7F000000),
    (_RETURN, 0, 0, 0xFFFFFFFF),
    (_RETURN, 0, 0, 0),
)


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """(inode, duplicate) of every TCP socket of this process, each once. The caller closes the duplicates."""
    seen: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
            if link in seen or not link.startswith("socket:["):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        seen.add(link)
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield int(link[len("socket:[") : -1]), found
        else:
            found.close()


def listening_inodes() -> set[int]:
    """Which sockets of this process listen now."""
    inodes = set()
    for inode, candidate in own_sockets():
        with candidate:
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                inodes.add(inode)
    return inodes


def listeners_since(before: Collection[int]) -> list[socket.socket]:
    """Duplicates of the listening sockets that are not in `before`. The caller closes them."""
    found = []
    for inode, candidate in own_sockets():
        if inode not in before and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.append(candidate)
        else:
            candidate.close()
    return found


def confine_to_loopback(served: Iterable[socket.socket]) -> None:
    """From now on only packets to 127.0.0.0/8 reach the listeners `served`, and what others had opened is shut down.

    Raises Rejected where the kernel does not let this process do it, Bug where it has no socket filters.
    """
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _LOOPBACK_ONLY)
    memory = ctypes.create_string_buffer(program)
    argument = struct.pack("HP", len(_LOOPBACK_ONLY), ctypes.addressof(memory))
    ports = set()
    for listener in served:
        port = listener.getsockname()[1]
        try:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, argument)
        except PermissionError:
            raise Rejected("transfer.host", f"cannot confine port {port} to loopback: {NOT_ALLOWED}") from None
        except OSError as error:
            raise Bug(f"cannot confine port {port} to loopback: {error}") from error
        ports.add(port)
    for _, candidate in own_sockets():
        with candidate:
            if is_foreign(candidate, ports):
                candidate.shutdown(socket.SHUT_RDWR)


def is_foreign(candidate: socket.socket, ports: Collection[int]) -> bool:
    """True for a connection to one of `ports` whose peer is not on loopback."""
    try:
        peer = candidate.getpeername()[0]
    except OSError:  # not connected
        return False
    return candidate.getsockname()[1] in ports and not peer.removeprefix("::ffff:").startswith("127.")
