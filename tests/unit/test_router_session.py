"""What a router sends to heads and to the broker gets there, whoever goes away and however far behind they are."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.services.router import session as session_module
from stagemesh.services.router.opening import Tickets
from stagemesh.services.router.session import INSTANCE, HeadSession, Receiver
from stagemesh.shared.codec.mesh import request_from_pb
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceOutput
from stagemesh.shared.errors import Bug, Exhausted, ProtocolViolation, Retryable, StagemeshError, Unsupported
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.tasks import Tasks
from tests.support.doubles import Partial
from tests.support.instances import PREFILL, instance_of


class Nobody:
    def on_output(self, output: SequenceOutput) -> None: ...

    def on_lost(self, instance: InstanceRef, reason: str) -> None: ...


def far_behind(monkeypatch: pytest.MonkeyPatch, most: int) -> HeadSession:
    """A session whose head reads nothing."""
    monkeypatch.setattr(session_module, "MAX_QUEUED", most)
    log = Log(logging.getLogger(__name__))
    session = HeadSession(instance_of("p", PREFILL), "router", lambda work: work.close(), log, lambda: None)
    session.up = True
    return session


def submit(
    session: HeadSession, number: int, receiver: Receiver | None = None, token_ids: Sequence[int] = (1,)
) -> RequestRef:
    ref, params, tokens = RequestRef("r", number), SamplingParams(max_tokens=9), list(token_ids)
    taker = receiver or Nobody()
    session.submit(taker, ref, params, prompt_tokens=1, token_ids=tokens, ticket_id="t", peer=InstanceRef("d", 1))
    return ref


def sent(session: HeadSession) -> list[instance_pb2.SessionUp]:
    queue = session._outgoing
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_a_head_far_behind_gets_no_more_requests_but_every_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = far_behind(monkeypatch, most=3)
        refs = [submit(session, number) for number in range(3)]
        with pytest.raises(Exhausted, match="takes no more requests"):
            submit(session, 4)
        assert session.num_requests == 3
        for ref in refs:
            session.first_token(ref, 5)
            session.abort(ref)
            session.abort(ref)
        session.close()
        kinds = [(m.WhichOneof("kind"), m) for m in sent(session)]
        aborts = [request_from_pb(message.abort.request) for kind, message in kinds if kind == "abort"]
        assert aborts == refs
        assert sum(kind == "first_token" for kind, _ in kinds) == 3

    asyncio.run(run())


class Hanging(Partial):
    """A head that takes the stream and reads nothing of it."""

    async def Session(self, messages: Any, context: Any) -> None:  # noqa: N802
        await asyncio.get_running_loop().create_future()


def test_a_head_that_hangs_is_lost_when_the_directory_says_so(tmp_path: Path) -> None:
    """Though messages for it fill the connection, and it never answers."""

    async def run() -> None:
        server = Server({INSTANCE: Hanging()})
        info = dataclasses.replace(instance_of("p", PREFILL), address=await server.start(f"unix:{tmp_path}/s"))
        up, lost = asyncio.Event(), asyncio.Queue[str]()
        receiver = cast("Any", SimpleNamespace(on_output=None, on_lost=lambda ref, reason: lost.put_nowait(reason)))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            log = Log(logging.getLogger(__name__))
            session = HeadSession(info, "router", group.create_task, log, up.set)
            await up.wait()
            params, tokens = SamplingParams(max_tokens=9), [1] * 100_000
            for number in range(3):
                ref = RequestRef("r", number)
                session.submit(
                    receiver, ref, params, prompt_tokens=1, token_ids=tokens, ticket_id="t", peer=InstanceRef("d", 1)
                )
            await asyncio.sleep(0)
            session.close()
            assert await lost.get() == "p is lost: it is gone from the directory", "why, this router does not know"
        await server.stop()

    asyncio.run(run())


class Listening(Hanging):
    """A head that counts what comes."""

    def __init__(self) -> None:
        self.kinds: asyncio.Queue[str] = asyncio.Queue()

    async def Session(self, messages: Any, context: Any) -> None:  # noqa: N802
        async for message in messages:
            self.kinds.put_nowait(message.WhichOneof("kind"))


def test_a_router_that_has_nothing_to_say_pulses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PULSE_S", 0.01)

    async def run() -> None:
        head = Listening()
        server = Server({INSTANCE: head})
        info = dataclasses.replace(instance_of("p", PREFILL), address=await server.start(f"unix:{tmp_path}/s"))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            session = HeadSession(info, "router", group.create_task, Log(logging.getLogger(__name__)), lambda: None)
            assert await head.kinds.get() == "open"
            submit(session, 1)
            kinds = [await head.kinds.get() for _ in range(6)]
            session.close()
        await server.stop()
        assert kinds.count("submit") == 1
        assert kinds.count("pulse") == 5

    asyncio.run(run())


def test_what_a_broken_connection_says_is_for_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = Server({INSTANCE: Listening()})
        address = await server.start(f"unix:{tmp_path}/s")
        info = dataclasses.replace(instance_of("p", PREFILL), address=address)
        up, lost = asyncio.Event(), asyncio.Queue[str]()
        receiver = cast("Any", SimpleNamespace(on_output=None, on_lost=lambda ref, reason: lost.put_nowait(reason)))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            log = Log(logging.getLogger(__name__))
            session = HeadSession(info, "router", group.create_task, log, up.set)
            await up.wait()
            params = SamplingParams(max_tokens=9)
            session.submit(receiver, RequestRef("r", 1), params, prompt_tokens=1, token_ids=[1], ticket_id="t")
            await server.stop()
            assert await lost.get() == "p is lost: the connection to it has broken"
        (said,) = [record for record in caplog.records if record.getMessage() == "requests lose their instance"]
        assert address in vars(said)["fields"]["reason"]

    asyncio.run(run())


class SlowBroker:
    """Answers when told to."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failed: list[str] = []

    async def open_ticket(self, *what: Any) -> str:
        return await self.answer

    async def fail_ticket(self, ticket_id: str, reason: str, *, quiescent: bool = False) -> None:
        self.failed.append(ticket_id)


@pytest.mark.parametrize("goes_at", range(1, 6))
@pytest.mark.parametrize("fails", [False, True])
def test_a_ticket_is_used_or_failed_whenever_the_client_goes_away(goes_at: int, fails: bool) -> None:
    """`goes_at` is a turn of the loop; the broker answers in turn 1."""

    async def run() -> None:
        broker = SlowBroker()
        async with asyncio.TaskGroup() as group:

            def spawn(work: Coroutine[Any, Any, None]) -> object:
                return group.create_task(work)

            tickets = Tickets(broker, spawn, Log(logging.getLogger(__name__)))  # type: ignore[arg-type]
            ref, instance = RequestRef("r", 1), InstanceRef("i", 1)
            opening = asyncio.ensure_future(tickets.open(ref, instance, instance, 1, 1))
            for turn in range(7):
                if turn == 1 and fails:
                    broker.answer.set_exception(Retryable("away"))
                elif turn == 1:
                    broker.answer.set_result("t")
                if turn == goes_at:
                    opening.cancel()
                await asyncio.sleep(0)
            try:
                used = [await opening]
            except (asyncio.CancelledError, Retryable):
                used = []
        assert [*used, *broker.failed] == ([] if fails else ["t"])

    asyncio.run(run())


@pytest.mark.parametrize("error", [Bug("its own mistake"), Unsupported("not known"), ProtocolViolation("not now")])
def test_a_broker_that_cannot_fail_a_ticket_does_not_end_the_router(error: StagemeshError) -> None:
    class Broken(SlowBroker):
        async def fail_ticket(self, ticket_id: str, reason: str, *, quiescent: bool = False) -> None:
            await super().fail_ticket(ticket_id, reason)
            raise error

    async def run() -> None:
        broker, tasks = Broken(), Tasks()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(tasks.run())
            Tickets(broker, tasks.spawn, Log(logging.getLogger(__name__))).fail("t", "gone")  # type: ignore[arg-type]
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(tasks) == 0
            running.cancel()
        assert broker.failed == ["t"]

    asyncio.run(run())
