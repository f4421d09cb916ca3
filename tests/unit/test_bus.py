"""The same behaviour from the bus over a real NATS server and from its in-memory twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from stagemesh.shared.bus.base import Bus, Watcher
from stagemesh.shared.bus.events import MAX_EARLY, EventKind, Events, Gaps, events_subject, read_event
from stagemesh.shared.bus.memory import MemoryServer, matches
from stagemesh.shared.bus.nats import open_nats_bus
from stagemesh.shared.errors import Bug, Retryable
from tests.support.nats import NatsServer, nats_server

LIMIT_S = 30.0


class Harness(Protocol):
    def connect(self, max_queued: int = 1024, watcher: Watcher | None = None) -> AbstractAsyncContextManager[Bus]: ...

    def leave(self) -> None: ...

    def come_back(self) -> None: ...


class MemoryHarness:
    def __init__(self) -> None:
        self._server = MemoryServer()
        self.leave, self.come_back = self._server.leave, self._server.come_back

    @asynccontextmanager
    async def connect(self, max_queued: int = 1024, watcher: Watcher | None = None) -> AsyncIterator[Bus]:
        bus = self._server.connect(max_queued=max_queued, watcher=watcher)
        try:
            yield bus
        finally:
            await bus.close()


class NatsHarness:
    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.leave, self.come_back = server.stop, server.start

    def connect(self, max_queued: int = 1024, watcher: Watcher | None = None) -> AbstractAsyncContextManager[Bus]:
        return open_nats_bus(
            self._server.url, name="test", connect_timeout_s=LIMIT_S, max_queued=max_queued, watcher=watcher
        )


@pytest.fixture(params=["memory", "nats"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    if request.param == "memory":
        yield MemoryHarness()
    else:
        with nats_server(tmp_path / "store") as server:
            yield NatsHarness(server)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


@asynccontextmanager
async def running(bus: Bus) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bus.run())
        try:
            yield
        finally:
            task.cancel()


class Inbox:
    """What a subscription received, and a wait for a number of it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    def __call__(self, subject: str, payload: bytes) -> None:
        self._queue.put_nowait((subject, payload))

    async def take(self, count: int) -> list[tuple[str, bytes]]:
        return [await self._queue.get() for _ in range(count)]


class Connection:
    """A watcher that can be waited for."""

    def __init__(self) -> None:
        self.lost, self.back = asyncio.Event(), asyncio.Event()

    def __call__(self, connected: bool) -> None:
        (self.back if connected else self.lost).set()


def test_epochs_grow_by_instance_whoever_asks(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.connect() as one, harness.connect() as two:
            assert [await one.next_epoch("decode-0"), await two.next_epoch("decode-0")] == [1, 2]
            assert await one.next_epoch("prefill-0") == 1

    run(scenario())


def test_epochs_asked_for_at_once_are_all_different(harness: Harness) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            buses = [await stack.enter_async_context(harness.connect()) for _ in range(4)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(bus.next_epoch("decode-0")) for bus in buses for _ in range(3)]
        assert sorted(task.result() for task in tasks) == list(range(1, 13))

    run(scenario())


def test_epochs_grow_on_over_an_absence_of_the_server(harness: Harness) -> None:
    async def scenario() -> None:
        connection = Connection()
        async with harness.connect(watcher=connection) as bus:
            assert await bus.next_epoch("decode-0") == 1
            harness.leave()
            await connection.lost.wait()
            with pytest.raises(Retryable):
                await bus.next_epoch("decode-0")
            harness.come_back()
            await connection.back.wait()
            assert await bus.next_epoch("decode-0") == 2
            assert bus.stats.num_reconnects == 1

    run(scenario())


def test_messages_arrive_in_order_and_only_where_the_subject_matches(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.connect() as sender, harness.connect() as receiver, running(sender):
            every, one, none = Inbox(), Inbox(), Inbox()
            await receiver.subscribe("mesh.>", every)
            await receiver.subscribe("mesh.*.b", one)
            await receiver.subscribe("mesh", none)
            for number in range(100):
                sender.publish("mesh.a.b" if number % 2 else "mesh.a.c", b"%d" % number)
            assert [int(payload) for _, payload in await every.take(100)] == list(range(100))
            assert [int(payload) for _, payload in await one.take(50)] == list(range(1, 100, 2))
            sender.publish("mesh", b"last")
            assert await none.take(1) == [("mesh", b"last")]

    run(scenario())


def test_publishing_without_a_server_neither_waits_nor_fails_and_what_was_kept_arrives_later(harness: Harness) -> None:
    async def scenario() -> None:
        connection, inbox = Connection(), Inbox()
        async with harness.connect(max_queued=10, watcher=connection) as bus, running(bus):
            await bus.subscribe("events", inbox)
            harness.leave()
            await connection.lost.wait()
            for number in range(25):
                bus.publish("events", b"%d" % number)
            assert not bus.stats.connected
            assert (bus.stats.num_queued, bus.stats.num_dropped) == (10, 15)
            harness.come_back()
            assert [int(payload) for _, payload in await inbox.take(10)] == list(range(10))

    run(scenario())


def test_what_is_queued_at_the_end_is_still_sent(harness: Harness) -> None:
    async def scenario() -> None:
        async with harness.connect() as receiver:
            inbox = Inbox()
            await receiver.subscribe("events", inbox)
            async with harness.connect() as sender:
                sender.publish("events", b"left")
            assert await inbox.take(1) == [("events", b"left")]

    run(scenario())


def test_closing_without_a_server_counts_what_was_never_sent(harness: Harness) -> None:
    async def scenario() -> None:
        connection = Connection()
        async with harness.connect(watcher=connection) as bus:
            harness.leave()
            await connection.lost.wait()
            bus.publish("events", b"left")
        assert (bus.stats.num_queued, bus.stats.num_dropped) == (0, 1)

    run(scenario())


def test_a_handler_that_raises_ends_the_bus(harness: Harness) -> None:
    def broken(subject: str, payload: bytes) -> None:
        raise ValueError(subject)

    async def scenario() -> None:
        async with harness.connect() as sender, harness.connect() as receiver, running(sender):
            await receiver.subscribe("events", broken)
            sender.publish("events", b"")
            with pytest.raises(Bug, match="ValueError"):
                await receiver.run()

    run(scenario())


def test_events_wait_for_a_bus_and_tell_what_is_missing(harness: Harness) -> None:
    """More than the outbox takes at once: what is dropped is counted, and a listener sees how many are missing."""
    events, gaps = Events("local", "b1"), Gaps()
    events.say(EventKind.JOINED, "decode-0", epoch=3)

    async def scenario() -> None:
        async with harness.connect(max_queued=10) as bus:
            inbox = Inbox()
            await bus.subscribe(events_subject("local", ">"), inbox)
            events.attach(bus)
            for _ in range(14):
                events.say(EventKind.RETRACTED, "decode-0", sequences=2)
            async with running(bus):
                heard = await inbox.take(10)
                events.say(EventKind.LOST, "decode-0", reason="its stream has ended")
                heard += await inbox.take(1)
        assert {subject for subject, _ in heard} == {"stagemesh.events.local.decode-0"}
        told = [read_event(payload) for _, payload in heard]
        assert [event.event.value for event in told] == ["joined", *["retracted"] * 9, "lost"]
        assert told[0].details == {"epoch": 3}
        assert [gaps.note(event) for event in told] == [0] * 10 + [5]
        assert events.num_dropped == 5
        assert len(events.recent) == 16

    run(scenario())


def test_events_without_any_bus_are_bounded_and_a_new_broker_starts_anew() -> None:
    events = Events("local", "b1")
    for _ in range(MAX_EARLY + 7):
        events.say(EventKind.CHANGED, "broker")
    assert events.num_dropped == 7
    gaps = Gaps()
    said = list(events.recent)
    assert gaps.note(said[-1]) == 0  # what was before it came is not its matter
    other = Events("local", "b2")
    other.say(EventKind.UP, "broker")
    assert gaps.note(other.recent[0]) == 0


def test_no_server_is_an_error_to_try_again() -> None:
    async def scenario() -> None:
        with pytest.raises(Retryable, match=r"no NATS server at .*:1 within 0\.2 s: ConnectionRefused"):
            async with open_nats_bus("nats://127.0.0.1:1", name="test", connect_timeout_s=0.2):
                pass

    run(scenario())


def test_what_the_server_does_not_take_is_dropped_and_counted(tmp_path: Path) -> None:
    async def scenario(connect: Callable[[], AbstractAsyncContextManager[Bus]]) -> None:
        async with connect() as bus, running(bus):
            inbox = Inbox()
            await bus.subscribe("events", inbox)
            bus.publish("events", b"x" * (2 << 20))
            bus.publish("events", b"small")
            assert await inbox.take(1) == [("events", b"small")]
            assert bus.stats.num_dropped == 1

    with nats_server(tmp_path / "store") as server:
        run(scenario(NatsHarness(server).connect))


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b", "a.b", True),
        (">", "a.b", True),
    ],
)
def test_the_twins_wildcards_are_those_of_nats(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected
