"""The streams between routers and this head. A router that is gone, or silent, takes its sequences with it.

router --submit, first token, abort; a pulse where there is nothing to say--> head
       <--one message a step, with the outputs of all of this router's sequences--
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from stagemesh.shared.codec.mesh import request_from_pb
from stagemesh.shared.codec.session import outputs_to_pb
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import Exhausted, PeerLost, ProtocolViolation
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.runtime.silence import LOOK_S, LOST_AFTER_S, Silence

MAX_QUEUED = 10_000  # messages to one router, which are a step's each: a router this far behind is gone


class Requests(Protocol):
    """Who takes what routers ask for."""

    def on_submit(self, submit: instance_pb2.SessionUp.Submit) -> None: ...

    def on_first_token(self, request: RequestRef, token_id: int) -> None: ...

    def on_abort(self, request: RequestRef) -> None: ...


class _Session:
    def __init__(self, router: str) -> None:
        self.router = router
        self.outgoing: asyncio.Queue[instance_pb2.SessionDown] = asyncio.Queue(MAX_QUEUED)
        self.requests: set[RequestRef] = set()
        self.unwritten = 0  # messages
        self.behind = asyncio.Event()
        self.silence = Silence()

    def tell(self, outputs: Iterable[SequenceOutput]) -> None:
        """Queues a message. A router that has not read so many is gone: it hangs, whatever its socket does."""
        try:
            self.outgoing.put_nowait(instance_pb2.SessionDown(outputs=outputs_to_pb(outputs)))
        except asyncio.QueueFull:
            self.behind.set()
        else:
            self.unwritten += 1


class Sessions:
    """Implements the Session rpc of the Instance service."""

    def __init__(self, requests: Requests, epoch: int, log: Log) -> None:
        self._requests, self._epoch, self._log = requests, epoch, log
        self._owner: dict[RequestRef, _Session] = {}
        self._open_ones: set[_Session] = set()
        self._written = asyncio.Event()  # all that one of them was to hear, or it is over
        self.is_closed = False  # what comes is to run elsewhere

    @property
    def num_open(self) -> int:
        return len(self._open_ones)

    @property
    def num_requests(self) -> int:
        return len(self._owner)

    async def written(self) -> None:
        """Returns when all that routers are to hear is on its way to them. One that does not read ends in time."""
        while any(session.unwritten for session in self._open_ones):
            self._written.clear()
            await self._written.wait()

    async def serve(self, messages: AsyncIterator[instance_pb2.SessionUp], context: Any) -> None:
        """One router's stream, to its end."""
        session: _Session | None = None
        others: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                async for message in messages:
                    if session is None:
                        session = self._open(message)
                        works = self._send(session, context), _raise_once_behind(session), _raise_once_silent(session)
                        others = [group.create_task(work) for work in works]
                    else:
                        session.silence.heard()
                        self._take(session, message)
                for other in others:
                    other.cancel()
        finally:
            if session is not None:
                self._close(session)

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Sends the outputs of a step on, a message a router."""
        by_session: dict[_Session, list[SequenceOutput]] = {}
        for output in outputs:
            session = self._owner.get(output.request)
            if session is None:
                continue  # its router is gone, or has aborted it
            by_session.setdefault(session, []).append(output)
            if output.end is not None:
                self.forget(output.request)
        for session, batch in by_session.items():
            session.tell(batch)

    def forget(self, request: RequestRef) -> None:
        """Nothing more will be said of it, or wanted. What its router still says of it is dropped."""
        session = self._owner.pop(request, None)
        if session is not None:
            session.requests.discard(request)

    def _open(self, message: instance_pb2.SessionUp) -> _Session:
        if message.WhichOneof("kind") != "open":
            raise ProtocolViolation("a session begins with `open`")
        if message.open.epoch != self._epoch:
            raise ProtocolViolation(f"epoch {message.open.epoch} is meant, this is {self._epoch}")
        session = _Session(message.open.router)
        self._open_ones.add(session)
        return session

    def _take(self, session: _Session, message: instance_pb2.SessionUp) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                self._submit(session, message.submit)
            case "first_token":
                request = request_from_pb(message.first_token.request)
                self._requests.on_first_token(request, message.first_token.token_id)
            case "abort":
                request = request_from_pb(message.abort.request)
                self.forget(request)
                self._requests.on_abort(request)
            case "pulse":
                pass
            case kind:
                raise ProtocolViolation(f"session message of unknown kind {kind}")

    def _submit(self, session: _Session, submit: instance_pb2.SessionUp.Submit) -> None:
        request = request_from_pb(submit.request)
        if request in self._owner:  # of another router, perhaps: that one's goes on
            refused = SequenceOutput(request, end=SequenceEnd.REJECTED, error="request_id: is in use by a live request")
            session.tell([refused])
            return
        if self.is_closed:
            session.tell([SequenceOutput(request, end=SequenceEnd.LOST, error="the instance has ended")])
            return
        self._owner[request] = session
        session.requests.add(request)
        self._requests.on_submit(submit)

    async def _send(self, session: _Session, context: Any) -> None:
        while True:
            await context.write(await session.outgoing.get())
            session.unwritten -= 1
            if not session.unwritten:
                self._written.set()

    def _close(self, session: _Session) -> None:
        self._open_ones.discard(session)
        self._written.set()
        if session.requests:
            self._log.warning(
                "a router has left its requests, or is gone",
                router=session.router,
                aborted_requests=len(session.requests),
            )
        for request in list(session.requests):
            self.forget(request)
            self._requests.on_abort(request)


async def _raise_once_behind(session: _Session) -> None:
    """Raises Exhausted once the router is too far behind, which ends its stream."""
    await session.behind.wait()
    raise Exhausted(f"{session.router} does not read: {MAX_QUEUED} messages wait for it")


async def _raise_once_silent(session: _Session) -> None:
    """Raises PeerLost once the router hangs: its clients may be gone, and nobody would say so."""
    while True:
        await asyncio.sleep(LOOK_S)
        if session.silence.look():
            raise PeerLost(f"{session.router} has been silent for {LOST_AFTER_S:g} s")
