"""What the mesh needs of NATS: epochs that only grow, events out, events in. Never the data path.

publish -> outbox (bounded) -> run() -> the server, now or when it is back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Handler = Callable[[str, bytes], None]
"""Called with subject and payload on the loop's thread. It must neither block nor raise."""


Watcher = Callable[[bool], None]
"""Called with False when the server is lost and with True when it is back, on the loop's thread."""


@dataclass(frozen=True, slots=True)
class BusStats:
    """`num_dropped` messages were never sent; `num_slow` times the server or the client threw away what we did not
    read in time; `num_queued` wait in the outbox; `num_refused` times the server did not allow what this process asked
    for."""

    connected: bool
    num_queued: int = 0
    num_dropped: int = 0
    num_slow: int = 0
    num_refused: int = 0
    num_reconnects: int = 0


class Bus(Protocol):
    """One connection of one process."""

    @property
    def stats(self) -> BusStats: ...

    async def next_epoch(self, instance: str) -> int:
        """A number greater than any given out for `instance` before, from 1 on. Raises Retryable without a server."""
        ...

    def publish(self, subject: str, payload: bytes) -> None:
        """Queues a message and returns at once. What does not fit in the outbox is dropped and counted."""
        ...

    async def subscribe(self, pattern: str, handler: Handler) -> None:
        """Calls `handler` for every message whose subject matches (`*` one token, `>` the rest), until `close`.
        Raises Retryable without a server."""
        ...

    async def run(self) -> None:
        """Sends what is published: a child of the service, which runs until cancelled. Raises Bug for a handler that
        raised."""
        ...

    async def close(self) -> None:
        """Sends what is queued if the server takes it within a second, then leaves."""
        ...
