"""Streams of routers at a head: one that hangs takes only itself down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stagemesh.shared.codec.mesh import request_to_pb
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.output import SequenceOutput
from stagemesh.shared.errors import Exhausted, PeerLost
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.rpc.errors import first_of_ours
from stagemesh.shared.stage import sessions as sessions_module
from stagemesh.shared.stage.sessions import Sessions

REF = RequestRef("r", 1)


class Requests:
    def __init__(self) -> None:
        self.submitted, self.aborted = asyncio.Event(), list[RequestRef]()

    def on_submit(self, submit: Any) -> None:
        self.submitted.set()

    def on_first_token(self, request: RequestRef, token_id: int) -> None: ...

    def on_abort(self, request: RequestRef) -> None:
        self.aborted.append(request)


class Deaf:
    """A connection that takes nothing any more."""

    async def write(self, message: Any) -> None:
        await asyncio.get_running_loop().create_future()


async def one_request() -> AsyncIterator[instance_pb2.SessionUp]:
    yield instance_pb2.SessionUp(open=instance_pb2.SessionUp.Open(router="router-1", epoch=1))
    yield instance_pb2.SessionUp(submit=instance_pb2.SessionUp.Submit(request=request_to_pb(REF)))
    await asyncio.get_running_loop().create_future()


def test_a_router_that_does_not_read_is_gone_and_the_instance_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_QUEUED", 5)

    async def run() -> None:
        requests = Requests()
        sessions = Sessions(requests, 1, Log(logging.getLogger(__name__)))
        serving = asyncio.ensure_future(sessions.serve(one_request(), Deaf()))
        await requests.submitted.wait()
        for _ in range(10):
            sessions.deliver([SequenceOutput(REF, (7,))])
        with pytest.raises(ExceptionGroup) as caught:
            await serving
        assert isinstance(first_of_ours(caught.value), Exhausted)
        assert (requests.aborted, sessions.num_open, sessions.num_requests) == ([REF], 0, 0)

    asyncio.run(run())


def test_a_silent_router_is_gone_and_one_that_pulses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "LOOK_S", 0.0)
    pulse = instance_pb2.SessionUp(pulse=instance_pb2.SessionUp.Pulse())

    async def hangs_after(pulses: int) -> AsyncIterator[instance_pb2.SessionUp]:
        async for message in one_request_of():
            yield message
        for _ in range(pulses):
            yield pulse
            await asyncio.sleep(0)
        await asyncio.get_running_loop().create_future()

    async def one_request_of() -> AsyncIterator[instance_pb2.SessionUp]:
        yield instance_pb2.SessionUp(open=instance_pb2.SessionUp.Open(router="router-1", epoch=1))
        yield instance_pb2.SessionUp(submit=instance_pb2.SessionUp.Submit(request=request_to_pb(REF)))

    async def run(pulses: int) -> int:
        """How many turns of the loop it took."""
        requests, turns = Requests(), 0
        sessions = Sessions(requests, 1, Log(logging.getLogger(__name__)))
        serving = asyncio.ensure_future(sessions.serve(hangs_after(pulses), Deaf()))
        while not serving.done():
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(ExceptionGroup) as caught:
            await serving
        assert isinstance(first_of_ours(caught.value), PeerLost)
        assert (requests.aborted, sessions.num_open, sessions.num_requests) == ([REF], 0, 0)
        return turns

    assert asyncio.run(run(100)) >= 100 > asyncio.run(run(0))


class Told:
    """A connection, and what came over it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[instance_pb2.SessionDown] = asyncio.Queue()

    async def write(self, message: Any) -> None:
        self.messages.put_nowait(message)


def test_what_comes_to_an_instance_that_has_ended_runs_elsewhere() -> None:
    async def run() -> None:
        requests, told = Requests(), Told()
        sessions = Sessions(requests, 1, Log(logging.getLogger(__name__)))
        sessions.is_closed = True
        serving = asyncio.ensure_future(sessions.serve(one_request(), told))
        (output,) = (await told.messages.get()).outputs
        assert (output.request.request_id, output.end) == ("r", instance_pb2.SEQUENCE_END_LOST)
        assert not requests.submitted.is_set()
        assert sessions.num_requests == 0
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(run())


def test_an_instance_that_ends_has_told_its_routers_everything() -> None:
    class Slow:
        """Takes a message when it is let."""

        def __init__(self) -> None:
            self.let = asyncio.Semaphore(0)

        async def write(self, message: Any) -> None:
            await self.let.acquire()

    async def run() -> None:
        requests, slow = Requests(), Slow()
        sessions = Sessions(requests, 1, Log(logging.getLogger(__name__)))
        serving = asyncio.ensure_future(sessions.serve(one_request(), slow))
        await requests.submitted.wait()
        await sessions.written()
        for token_id in (7, 8):
            sessions.deliver([SequenceOutput(REF, (token_id,))])
        sessions.forget(REF)
        waiting = asyncio.ensure_future(sessions.written())
        for _ in range(2):
            await asyncio.sleep(0.01)
            assert not waiting.done()
            slow.let.release()
        await waiting
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(run())
