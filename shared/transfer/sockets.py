"""What the kernel still holds of processes that have ended: bytes on their way, and bytes that nobody has read.

a process ends --> its host sends what its sockets held, then FIN --> ours are read to the end, then closed

So once the host of a reaped process has nothing of it to send, and no connection of ours has a far end that is gone,
nothing that it had sent can be applied any more. Linux only.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import socket
import struct
import termios
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from stagemesh.shared.transfer.listeners import own_sockets

FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.1
_BYTES_RECEIVED: Final = struct.Struct("128xQ")  # of struct tcp_info, linux/tcp.h
_UNACKED: Final = struct.Struct("24xI")  # there; of a listener it is how many connections wait to be accepted


class TcpState(IntEnum):
    """include/net/tcp_states.h"""

    ESTABLISHED = 1
    SYN_SENT = 2
    FIN_WAIT1 = 4
    CLOSE = 7
    LAST_ACK = 9
    LISTEN = 10
    CLOSING = 11


_SENDING: Final = frozenset({TcpState.FIN_WAIT1, TcpState.LAST_ACK, TcpState.CLOSING})
"""Of a socket that its process has closed: not all that it held is acknowledged."""

End = tuple[str, int]
Connection = tuple[End, End]
"""(local, remote), each an address and a port."""


@dataclass(frozen=True, slots=True)
class Row:
    """A socket of this host. One that no process has any more has no inode."""

    connection: Connection
    state: int
    inode: int


def parse_table(text: str, states: Collection[int]) -> Iterator[Row]:
    """The content of /proc/net/tcp or tcp6: the sockets in one of `states`. A busy host has ten thousands in others."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if (state := int(fields[3], 16)) in states:
            yield Row((_end(fields[1]), _end(fields[2])), state, int(fields[9]))


def host_sockets(states: Collection[int]) -> list[Row]:
    rows: list[Row] = []
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no such protocol on this host
            rows += parse_table(Path("/proc/net", name).read_text(), states)
    return rows


def unsent() -> frozenset[Connection]:
    """Connections of processes of this host that have ended, of which the far end has not acknowledged every byte."""
    return frozenset(row.connection for row in host_sockets(_SENDING) if not row.inode)


def num_unread(ports: Collection[int] | None = None) -> int:
    """Sockets of this process that may bring what a process that has ended had sent: those whose end here is one of
    `ports`, or all. A listener is one while a connection waits there to be accepted."""
    unsent_here = unsent()
    count = 0
    for _, own in own_sockets():
        with own:
            if ports is None or own.getsockname()[1] in ports:
                count += _may_bring(own, unsent_here)
    return count


async def until_sent() -> None:
    """Returns when this host has sent, and the far ends have, all that the processes held that have ended before the
    call. Whoever called `wait` for one of them knows that it is one of these."""
    left = await asyncio.to_thread(unsent)  # as are all looks: a table of all sockets is long
    pause_s = FIRST_PAUSE_S
    while left := left & await asyncio.to_thread(unsent):
        await asyncio.sleep(pause_s)  # the kernel tells nobody
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def until_read(ports: Collection[int] | None = None) -> None:
    """Returns when no connection of this process is left whose far end is gone.

    `ports` are those of a library's listeners, where peers' data comes by connections that it has accepted, never by
    those that it has made. It may keep the latter open for minutes after their far end has died: they bring nothing,
    and are not waited for. Where data comes both ways, or nobody knows, all are.
    """
    pause_s = FIRST_PAUSE_S
    while await asyncio.to_thread(num_unread, ports):
        await asyncio.sleep(pause_s)  # the libraries' threads read; they tell nobody
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _may_bring(own: socket.socket, unsent_here: frozenset[Connection]) -> bool:
    try:
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        state = info[0]
        if state == TcpState.LISTEN:
            return bool(_UNACKED.unpack_from(info)[0])
        if state == TcpState.CLOSE:  # was reset, or never connected; what has been received can still be read
            return bool(_received(info) or _num_waiting(own))
        if state == TcpState.ESTABLISHED:  # a far end on this host shows whether anybody has it
            return (_known(own.getpeername()), _known(own.getsockname())) in unsent_here
    except OSError:  # closed meanwhile
        return False
    return state != TcpState.SYN_SENT


def _received(info: bytes) -> int:
    return int(_BYTES_RECEIVED.unpack(info)[0]) if len(info) >= _BYTES_RECEIVED.size else 0


def _num_waiting(own: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(own.fileno(), termios.FIONREAD, bytes(4)))[0])


def _end(text: str) -> End:
    """`0100007F:1F90`: the address in words of the host's byte order, the port in the network's."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _known((str(ipaddress.ip_address(packed)), int(port, 16)))


def _known(name: tuple[str, int] | tuple[str, int, int, int]) -> End:
    """An IPv4 address that is written as an IPv6 one is the same end."""
    ip = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), name[1]
