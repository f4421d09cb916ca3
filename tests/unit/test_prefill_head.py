"""The head of a prefill instance: what it takes from submits, and its cache as others see it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stagemesh.services.prefill.head import PrefillHead
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.core.commands import HANDLE, SAMPLE, Command
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.errors import Retryable
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import broker_pb2, instance_pb2, stage_pb2
from stagemesh.shared.rpc.broker import Reservation
from tests.support.instances import PREFILL, instance_of

VOCAB = 100


class Stage:
    """All there is of an instance but its head. A step's result is back at once."""

    def __init__(self) -> None:
        self.scheduler = PrefillScheduler(
            num_pages=16, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1, run_ahead=0
        )
        context = SimpleNamespace(
            info=instance_of("p", PREFILL),
            log=Log(logging.getLogger("stagemesh.test")),
            vocab_size=VOCAB,
            issue=self._issue,
            tracer=Tracer("p/0"),
            broker=self,
            spawn=self._spawn,
        )
        self.head = PrefillHead(cast("Any", context), self.scheduler)
        self.failed: asyncio.Queue[str] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()
        self.order: list[int] = []

    def _issue(self, command: Command) -> None:
        if command.step is None:
            self.head.on_applied(command.number)
            return
        rows = command.step.rows
        self.order += rows[:, HANDLE].tolist()
        self.head.on_result(command.step.number, np.where(rows[:, -1] & SAMPLE, 7, -1), {})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def reserve(self, ticket_id: str) -> Reservation:
        return Reservation((0, 1, 2), ())

    async def fill(self, ticket_id: str) -> bool:
        return True

    async def fail_ticket(self, ticket_id: str, reason: str, *, quiescent: bool) -> None:
        self.failed.put_nowait(ticket_id)

    async def report_writer(self, report: broker_pb2.WriterReport) -> str:
        return "later"

    def settled(self, ticket_id: str, broker: str = "") -> None:
        report = broker_pb2.WriterReport(ticket_id=ticket_id, pp_rank=0)
        self.head.on_settled(stage_pb2.Settled(report=report, broker=broker))

    def submit(self, name: str, token_ids: Sequence[int], **standing: Any) -> None:
        ref = instance_pb2.RequestRef(request_id=name, attempt=1)
        sampling = instance_pb2.Sampling(max_tokens=1, top_p=1.0)
        ids = to_bytes(token_ids)
        self.head.on_submit(instance_pb2.SessionUp.Submit(request=ref, sampling=sampling, token_ids=ids, **standing))

    async def run_dry(self) -> None:
        await self.head.idle()
        assert not any(self.head.held.values())
        self.head.check_integrity()


def test_priority_waiting_and_recompute_reach_the_scheduler() -> None:
    async def run() -> list[int]:
        stage = Stage()
        stage.submit("plain", range(8))
        stage.submit("urgent", range(10, 18), priority=5)
        stage.submit("old", range(20, 28), waited_s=51.0)
        stage.submit("lost", range(30, 38), recompute=True, priority=-100)
        await stage.run_dry()
        return stage.order

    assert asyncio.run(run()) == [4, 3, 2, 1]


@pytest.mark.parametrize("waited_s", [-1.0, math.nan, math.inf])
def test_a_wait_that_is_no_time_is_refused(waited_s: float) -> None:
    async def run() -> int:
        stage = Stage()
        stage.submit("r", range(8), waited_s=waited_s)
        return stage.head.held["sequences"]

    assert asyncio.run(run()) == 0


def test_cached_pages_are_shown_not_held_and_can_be_flushed() -> None:
    async def run() -> None:
        stage = Stage()
        stage.submit("one", range(13))
        await stage.run_dry()
        stage.submit("other", range(13))
        await stage.run_dry()
        assert stage.head.gauges == {"pages_cached": 3}
        assert stage.head.load.pages_free == 16
        shown = {(sample.metric, sample.labels): sample.value for sample in stage.head.measure()}
        states = {"free": 13, "used": 0, "cached": 3, "quarantined": 0}
        assert {state: shown[metrics.PAGES, (state,)] for state in states} == states
        assert [shown[metrics.PREFILL_TOKENS, (how,)] for how in ("cached", "computed")] == [12, 14]
        assert stage.head.flush_cache() == 3
        assert stage.head.gauges == {"pages_cached": 0}
        assert stage.head.flush_cache() == 0
        stage.submit("again", range(13))
        await stage.run_dry()
        assert stage.scheduler.stats.cached_tokens == 12
        assert stage.scheduler.evicted_pages == 3

    asyncio.run(run())


class Router:
    """Its session with the head of a `Stage`: what it says, and the tokens it is told."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[instance_pb2.SessionUp | None] = asyncio.Queue()
        self.told: asyncio.Queue[instance_pb2.SequenceOutput] = asyncio.Queue()

    async def messages(self) -> AsyncIterator[instance_pb2.SessionUp]:
        yield instance_pb2.SessionUp(open=instance_pb2.SessionUp.Open(router="router-1", epoch=1))
        while (message := await self.says.get()) is not None:
            yield message

    async def write(self, message: instance_pb2.SessionDown) -> None:
        for output in message.outputs:
            self.told.put_nowait(output)

    def submit(self, name: str, ticket_id: str) -> None:
        submit = instance_pb2.SessionUp.Submit(
            request=instance_pb2.RequestRef(request_id=name, attempt=1),
            sampling=instance_pb2.Sampling(max_tokens=1000, top_p=1.0),
            token_ids=to_bytes(range(12)),
            ticket_id=ticket_id,
            peer_instance="d",
            peer_epoch=1,
        )
        self.says.put_nowait(instance_pb2.SessionUp(submit=submit))

    async def ask(self, name: str, ticket_id: str) -> list[int]:
        """Its first token, of a thousand."""
        self.submit(name, ticket_id)
        return list((await self.told.get()).token_ids)

    def abort(self, name: str) -> None:
        ref = instance_pb2.RequestRef(request_id=name, attempt=1)
        self.says.put_nowait(instance_pb2.SessionUp(abort=instance_pb2.SessionUp.AbortSequence(request=ref)))


@asynccontextmanager
async def router_of(stage: Stage) -> AsyncIterator[Router]:
    router = Router()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(stage.head.serve_session(router.messages(), router))
        yield router
        router.says.put_nowait(None)


def held(stage: Stage) -> dict[str, int]:
    return {what: count for what, count in stage.head.held.items() if count}


def test_a_request_is_no_work_of_this_instance_once_its_kv_is_there() -> None:
    """Whether it has been decoded or not: a drained instance may go."""

    async def run() -> None:
        stage = Stage()
        async with router_of(stage) as router:
            assert await router.ask("a", "t-a") == [7]
            assert held(stage)["requests"] == 1
            with pytest.raises(Retryable, match="1 requests"):
                stage.head.close()
            stage.settled("t-a")
            await stage.run_dry()
            router.abort("a")  # it has been decoded, or is not wanted any more
            assert await router.ask("a", "t-b") == [7], "nothing is left of the one before"
            stage.settled("t-b")
            await stage.run_dry()
            stage.head.close()
        assert stage.failed.empty()

    asyncio.run(run())


def test_what_is_aborted_while_its_kv_is_sent_fails_its_ticket() -> None:
    async def run() -> None:
        stage = Stage()
        async with router_of(stage) as router:
            await router.ask("a", "t-a")
            await router.ask("b", "t-b")
            router.abort("a")
            assert await stage.failed.get() == "t-a"
            assert held(stage)["sequences"] == 2
        assert await stage.failed.get() == "t-b", "its router has gone"
        stage.settled("t-a")
        stage.settled("t-b")
        await stage.run_dry()

    asyncio.run(run())


def test_what_goes_again_before_it_is_forgotten_is_not_forgotten() -> None:
    async def run() -> None:
        stage = Stage()
        async with router_of(stage) as router:
            await router.ask("a", "t-a")
            router.abort("a")
            router.submit("a", "t-b")
            stage.settled("t-a")  # what follows from it comes after both
            assert list((await router.told.get()).token_ids) == [7]
            assert held(stage)["requests"] == 1
            stage.settled("t-b")
            await stage.run_dry()

    asyncio.run(run())


def test_what_this_start_of_the_broker_has_not_heard_is_work() -> None:
    """Its KV is of no use as long: the decode side waits for it."""

    async def run() -> None:
        stage = Stage()
        async with router_of(stage) as router:
            stage.head.on_joined("first")
            await router.ask("a", "t-a")
            stage.settled("t-a", "later")
            assert held(stage)["reports"] == 1
            stage.head.on_joined("later")
            await stage.run_dry()

    asyncio.run(run())
