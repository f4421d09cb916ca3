"""The control socket of `stagemesh up`: what its operator asks of it, one request and one reply a connection.

accepted --a line, in time--> asked --the reply, at once or when it is done--> closed
   `--no line in time, or no request--> closed                 `--the client has gone: what it asked for goes on

A unix socket of mode 0600 in the private run dir; requests and replies are JSON, a line each.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from stagemesh.shared.errors import PeerLost, ProtocolViolation, Rejected, Retryable, Unreachable

CONTROL_SOCKET: Final = "control.sock"
"""Its name in the run dir."""
MAX_REQUEST_BYTES: Final = 4096
MAX_REPLY_BYTES: Final = 1 << 20
MAX_CONNECTIONS: Final = 8
REQUEST_WITHIN_S: Final = 5.0


class ControlRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`groups`: what there is. `restart`: drain `group`, start it again, and answer when it is ready."""

    command: Literal["groups", "restart"]
    group: Annotated[str, Meta(max_length=80)] = ""


class GroupInfo(Struct, frozen=True):
    """What is started again as one: `role` is prefill, decode, router, broker or nats."""

    name: str
    role: str


class ControlReply(Struct, frozen=True, omit_defaults=True):
    """`error` is empty if it was done. Of a restart: `start` counts the group's starts, `epoch` is the instance's new
    one, `troubles` are processes that did not end well. Of groups: all of them, and where the router is."""

    error: str = ""
    groups: tuple[GroupInfo, ...] = ()
    router: str = ""
    start: int = 0
    epoch: int = 0
    troubles: tuple[str, ...] = ()


class Connection:
    """One client."""

    def __init__(self, stream: socket.socket, now_s: float) -> None:
        self.stream, self.since_s = stream, now_s
        self.data = b""
        self.has_asked = False

    def fileno(self) -> int:
        return self.stream.fileno()


class ControlSocket:
    """For a loop that waits in `select`: it never waits itself. `on_request` answers by `reply`, now or later."""

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self.path, self._selector = path, selector
        self.on_request: Callable[[Connection, ControlRequest], None] = lambda *_: None
        self._connections: list[Connection] = []
        path.unlink(missing_ok=True)  # a kept run dir may have an old one
        self._socket = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.setblocking(False)
        self._socket.listen(MAX_CONNECTIONS)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    @property
    def fds(self) -> list[int]:
        """What a forked child must not keep open."""
        return [self._socket.fileno(), *(connection.fileno() for connection in self._connections)]

    @property
    def deadline_s(self) -> float | None:
        """When a client may be too slow next."""
        pending = [connection.since_s for connection in self._connections if not connection.has_asked]
        return min(pending) + REQUEST_WITHIN_S if pending else None

    def look(self, now_s: float) -> None:
        """Lets go of those that have not asked in time."""
        for connection in list(self._connections):
            if not connection.has_asked and now_s >= connection.since_s + REQUEST_WITHIN_S:
                self._close(connection)

    def reply(self, connection: Connection, reply: ControlReply) -> None:
        """And that is all. A client that has gone hears nothing."""
        if connection in self._connections:
            with suppress(OSError):  # a reply fits into the socket, which has nothing in it
                connection.stream.send(msgspec.json.encode(reply) + b"\n")
            self._close(connection)

    def close(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
        self._selector.unregister(self._socket)
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            stream, _ = self._socket.accept()
            if len(self._connections) >= MAX_CONNECTIONS:
                stream.close()
                return
            stream.setblocking(False)
            connection = Connection(stream, time.monotonic())
            self._connections.append(connection)
            self._selector.register(stream, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        if connection not in self._connections:  # it was closed in this very turn
            return
        data = b""
        with suppress(OSError):
            data = connection.stream.recv(MAX_REQUEST_BYTES)
        connection.data += data
        if not data or connection.has_asked or len(connection.data) > MAX_REQUEST_BYTES:
            self._close(connection)
        elif connection.data.endswith(b"\n"):
            connection.has_asked = True
            self._take(connection)

    def _take(self, connection: Connection) -> None:
        try:
            request = msgspec.json.decode(connection.data, type=ControlRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            self.reply(connection, ControlReply(error=f"request: {error}"))
        else:
            self.on_request(connection, request)

    def _close(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.stream)
        connection.stream.close()


def ask(path: Path, request: ControlRequest, timeout_s: float) -> ControlReply:
    """The client's side, which waits. Raises Unreachable if nobody listens or answers in time, PeerLost if the mesh
    ends meanwhile, Retryable for what is refused now."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(timeout_s)
        try:
            stream.connect(str(path))
            stream.sendall(msgspec.json.encode(request) + b"\n")
            data = _read_line(stream)
        except TimeoutError:
            raise Unreachable(f"{path}: no answer within {timeout_s:g} s") from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise Unreachable(f"no `stagemesh up` listens at {path}") from None
        except OSError as error:
            raise Rejected("run_dir", f"{path}: {error.strerror or error}") from None
    if not data.endswith(b"\n"):
        raise PeerLost(f"{path}: closed without an answer; the log of `stagemesh up` says why")
    try:
        reply = msgspec.json.decode(data, type=ControlReply)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"{path}: {error}") from None
    if reply.error:
        raise Retryable(reply.error)
    return reply


def _read_line(stream: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_REPLY_BYTES and (more := stream.recv(1 << 16)):
        data += more
    return data
