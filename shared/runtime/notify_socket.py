"""The supervisor's side of the sd_notify protocol: one datagram socket, senders told apart by their credentials."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_MAX_DATAGRAM_BYTES: Final = 4096


class NotifySocket:
    """Listens at `path` for the life of the supervisor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)  # a kept run dir may have an old one
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> tuple[int, dict[str, str]] | None:
        """(sender's pid as the kernel vouches for it, the lines), or None if nothing waits."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return None
        pids = [
            _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
            for level, kind, value in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS
        ]
        pairs = (line.partition("=") for line in data.decode(errors="replace").splitlines())
        return (pids[0] if pids else 0), {name: value for name, _, value in pairs}

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
