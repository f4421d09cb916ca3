"""The end of a ring's stream: a neighbour that leaves, and one that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import Bug, PeerLost, ProtocolViolation, Rejected
from stagemesh.shared.obs.log import configure
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.stage import ring as ring_module
from stagemesh.shared.stage.ring import STAGE_LINK, RingIn, RingOut
from stagemesh.shared.transfer.backends import open_endpoint


class Heard:
    """A listener that keeps what it hears of acknowledgements."""

    def __init__(self) -> None:
        self.applied: list[int] = []

    def on_applied(self, number: int) -> None:
        self.applied.append(number)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was not expected")


async def stream(*messages: stage_pb2.RingMessage) -> AsyncIterator[stage_pb2.RingMessage]:
    for message in messages:
        yield message


APPLIED = stage_pb2.RingMessage(applied=stage_pb2.Applied(number=3))
LEAVING = stage_pb2.RingMessage(leaving=stage_pb2.Leaving())


def test_a_stream_that_ends_without_a_word_is_a_loss() -> None:
    async def run() -> None:
        heard, finished = Heard(), list[str]()
        ring = RingIn(heard)
        await ring.accept(stream(APPLIED))
        with pytest.raises(PeerLost):
            await ring.watch(finished.append)
        assert (heard.applied, finished) == ([3], [])

    asyncio.run(run())


def test_a_stage_ends_with_what_a_message_came_to_not_with_the_loss_of_who_sent_it() -> None:
    class Strict(Heard):
        def on_applied(self, number: int) -> None:
            raise Bug(f"{number} is not a number that can be")

    async def run() -> None:
        ring = RingIn(Strict())
        with pytest.raises(Bug):
            await ring.accept(stream(APPLIED, LEAVING))
        with pytest.raises(Bug, match="3 is not a number"):
            await ring.watch(list[str]().append)

    asyncio.run(run())


def test_a_neighbour_that_leaves_is_no_loss() -> None:
    async def run() -> None:
        finished = list[str]()
        ring = RingIn(Heard())
        await ring.accept(stream(APPLIED, LEAVING))
        await ring.watch(finished.append)
        assert finished == [""]
        with pytest.raises(ProtocolViolation, match="previous stage already"):
            await ring.accept(stream())

    asyncio.run(run())


async def pulses(count: int) -> AsyncIterator[stage_pb2.RingMessage]:
    """Each is followed by a moment of silence; then, for good."""
    for number in range(count):
        yield stage_pb2.RingMessage(applied=stage_pb2.Applied(number=number))
        await asyncio.sleep(3 * 0.01)
    await asyncio.get_running_loop().create_future()


def test_a_neighbour_that_is_silent_is_lost_though_its_stream_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "LOOK_S", 0.01)

    async def run() -> None:
        heard = Heard()
        ring = RingIn(heard)
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(ring.accept(pulses(8)))
            with pytest.raises(PeerLost, match="has been silent for 2 s"):
                await ring.watch(list[str]().append)
            accepting.cancel()
        assert heard.applied == list(range(8))

    asyncio.run(run())


class Link:
    """The next stage's server."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.ring = RingIn(self.heard)

    async def Connect(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("not expected")

    async def Ring(self, messages: Any, context: Any) -> stage_pb2.RingClosed:  # noqa: N802
        return await self.ring.accept(messages)


@pytest.mark.parametrize("next_role", ["", "decode"])
def test_what_is_queued_arrives_before_the_leave(tmp_path: Any, next_role: str) -> None:
    async def run() -> None:
        link, finished = Link(), list[str]()
        server = Server({STAGE_LINK: link})
        address = await server.start(f"unix:{tmp_path}/s")
        ring = RingOut()
        async with Client(address, STAGE_LINK) as client, asyncio.TaskGroup() as group:
            group.create_task(ring.run(client))
            ring.applied(7)
            await ring.finish(next_role)
        await link.ring.watch(finished.append)
        await server.stop()
        assert (link.heard.applied, finished, link.ring.next_role) == ([7], [next_role], next_role)

    asyncio.run(run())


def test_a_socket_that_somebody_listens_on_is_not_taken_away(tmp_path: Any) -> None:
    async def run() -> None:
        first, second = Server({STAGE_LINK: Link()}), Server({STAGE_LINK: Link()})
        address = await first.start(f"unix:{tmp_path}/s")
        with pytest.raises(Rejected, match="another process does"):
            await second.start(address)
        async with Client(address, STAGE_LINK) as client:
            with pytest.raises(Exception, match="not expected"):
                await client.call("Connect", stage_pb2.ConnectRequest(), timeout_s=10)  # the first one answers
        await first.stop()
        await second.start(address)
        await second.stop()

    asyncio.run(run())


def test_a_transfer_host_that_has_no_address_is_refused() -> None:
    with pytest.raises(Rejected, match=r"transfer.host: 'nohost.invalid' cannot be resolved"):
        open_endpoint(TransferSection(host="nohost.invalid"), "cpu", configure("test"))
