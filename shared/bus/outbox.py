"""Messages that wait to be sent: bounded, first in first out, full means dropped and counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from stagemesh.shared.errors import Bug

MAX_QUEUED = 1024


class Outbox:
    """Owned by a bus. `work` is set whenever its run loop has something to look at."""

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._messages: deque[tuple[str, bytes]] = deque()
        self._max_queued = max_queued
        self._failure: Exception | None = None
        self.work = asyncio.Event()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, subject: str, payload: bytes) -> None:
        if len(self._messages) >= self._max_queued:
            self.num_dropped += 1
            return
        self._messages.append((subject, payload))
        self.work.set()

    def take(self) -> tuple[str, bytes] | None:
        return self._messages.popleft() if self._messages else None

    def drop_all(self) -> None:
        self.num_dropped += len(self._messages)
        self._messages.clear()

    def fail(self, error: Exception) -> None:
        """A handler raised `error`: the run loop ends with it."""
        self._failure = error
        self.work.set()

    async def run(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Calls `flush` whenever there is work, until cancelled."""
        while True:
            await self.work.wait()
            self.work.clear()
            if self._failure is not None:
                raise Bug(f"a bus handler raised {self._failure!r}") from self._failure
            await flush()
