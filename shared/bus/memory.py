"""The bus within one process: the twin for tests, with a server that can be away."""

from __future__ import annotations

from stagemesh.shared.bus.base import BusStats, Handler, Watcher
from stagemesh.shared.bus.outbox import MAX_QUEUED, Outbox
from stagemesh.shared.errors import Retryable


def matches(pattern: str, subject: str) -> bool:
    """NATS's subject wildcards."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and matches(".".join(wanted[:-1]), ".".join(tokens[: len(wanted) - 1]))
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


class MemoryServer:
    """What the buses of a test share. `leave` and `come_back` are the faults."""

    def __init__(self) -> None:
        self.is_away = False
        self._epochs: dict[str, int] = {}
        self._buses: list[MemoryBus] = []

    def leave(self) -> None:
        self.is_away = True
        for bus in self._buses:
            bus.disconnected()

    def come_back(self) -> None:
        self.is_away = False
        for bus in self._buses:
            bus.reconnected()

    def connect(self, *, max_queued: int = MAX_QUEUED, watcher: Watcher | None = None) -> MemoryBus:
        """Raises Retryable while the server is away."""
        self.check_here()
        bus = MemoryBus(self, max_queued, watcher)
        self._buses.append(bus)
        return bus

    def check_here(self) -> None:
        if self.is_away:
            raise Retryable("the bus has no server")

    def disconnect(self, bus: MemoryBus) -> None:
        self._buses.remove(bus)

    def next_epoch(self, instance: str) -> int:
        self._epochs[instance] = self._epochs.get(instance, 0) + 1
        return self._epochs[instance]

    def deliver(self, subject: str, payload: bytes) -> None:
        for bus in self._buses:
            bus.receive(subject, payload)


class MemoryBus:
    """Opened by `MemoryServer.connect`."""

    def __init__(self, server: MemoryServer, max_queued: int, watcher: Watcher | None) -> None:
        self._server = server
        self._watcher = watcher
        self._outbox = Outbox(max_queued)
        self._handlers: list[tuple[str, Handler]] = []
        self._num_reconnects = 0

    @property
    def stats(self) -> BusStats:
        return BusStats(
            connected=not self._server.is_away,
            num_queued=len(self._outbox),
            num_dropped=self._outbox.num_dropped,
            num_reconnects=self._num_reconnects,
        )

    async def next_epoch(self, instance: str) -> int:
        self._server.check_here()
        return self._server.next_epoch(instance)

    def publish(self, subject: str, payload: bytes) -> None:
        self._outbox.put(subject, payload)

    async def subscribe(self, pattern: str, handler: Handler) -> None:
        self._server.check_here()
        self._handlers.append((pattern, handler))

    async def run(self) -> None:
        await self._outbox.run(self._flush)

    async def close(self) -> None:
        await self._flush()
        self._outbox.drop_all()
        self._server.disconnect(self)

    def disconnected(self) -> None:
        if self._watcher is not None:
            self._watcher(False)

    def reconnected(self) -> None:
        self._num_reconnects += 1
        self._outbox.work.set()
        if self._watcher is not None:
            self._watcher(True)

    def receive(self, subject: str, payload: bytes) -> None:
        for pattern, handler in self._handlers:
            if matches(pattern, subject):
                try:
                    handler(subject, payload)
                except Exception as error:
                    self._outbox.fail(error)

    async def _flush(self) -> None:
        while not self._server.is_away and (message := self._outbox.take()) is not None:
            self._server.deliver(*message)
