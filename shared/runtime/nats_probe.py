"""Whether the NATS server answers: it greets whoever connects. One that is stopped accepts, and says nothing."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

GREETING: Final = b"INFO "


class NatsProbe:
    """Connects now and then without waiting; `on_greeting` is called for every answer. One connection at a time, so one
    that is never answered stays the last one."""

    def __init__(self, selector: selectors.BaseSelector, interval_s: float, on_greeting: Callable[[], None]) -> None:
        self._selector, self._interval_s, self._on_greeting = selector, interval_s, on_greeting
        self._socket: socket.socket | None = None
        self._next_s = 0.0

    @property
    def fds(self) -> list[int]:
        """What a forked child must not keep open."""
        return [] if self._socket is None else [self._socket.fileno()]

    def tick(self, now_s: float, address: str) -> None:
        """Begins a probe of `host:port` if it is time for one."""
        if self._socket is not None or now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        host, _, port = address.rpartition(":")
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex((host, int(port)))
        self._selector.register(self._socket, selectors.EVENT_READ, self._on_readable)

    @property
    def deadline_s(self) -> float | None:
        """When the next one may begin; None while one waits for its answer."""
        return self._next_s if self._socket is None else None

    def close(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _on_readable(self) -> None:
        assert self._socket is not None
        data = b""
        with suppress(OSError):  # nobody listens, or it died meanwhile: no answer
            data = self._socket.recv(len(GREETING))
        self.close()
        if data == GREETING:
            self._on_greeting()
