"""The decode head carries out what its scheduler wants when pages run out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.services.decode.head import DecodeHead
from stagemesh.shared.codec.arrays import to_tuple
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.decode_state import DecodeActions
from stagemesh.shared.errors import Cancelled, ProtocolViolation, Rejected, Retryable, StagemeshError
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import instance_pb2
from tests.support.instances import DECODE, instance_of


class Broker:
    """Answers `unreserve` when it is told to."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, asyncio.Future[bool]]] = asyncio.Queue()

    async def unreserve(self, ticket_id: str) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((ticket_id, answer))
        return await answer


class Scheduler(DecodeScheduler):
    """Wants pages back when the test says so; the rest is real."""

    def __init__(self) -> None:
        super().__init__(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
        self._wanted_back: list[str] = []

    def want_back(self, ticket_id: str) -> None:
        sequence = self.sequences.of_ticket(ticket_id)
        assert sequence is not None
        assert sequence.cancellable
        sequence.asked_back = True
        self._wanted_back.append(ticket_id)

    def poll(self) -> DecodeActions:
        actions = super().poll()
        actions.cancelled += self._wanted_back
        self._wanted_back = []
        return actions


class Case:
    """A head with one ticket that has its pages."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group, self.broker, self.scheduler = group, Broker(), Scheduler()
        info = instance_of("d", DECODE)
        log = Log(logging.getLogger("stagemesh.test"))
        context = SimpleNamespace(
            info=info, log=log, vocab_size=100, broker=self.broker, spawn=self._spawn, issue=lambda command: None
        )
        self.head = DecodeHead(cast("Any", context), self.scheduler)
        self._epoch = info.ref.epoch

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.group.create_task(work)

    def submit(self, **options: Any) -> None:
        sampling = instance_pb2.Sampling(max_tokens=4, top_p=1.0)
        ref = instance_pb2.RequestRef(request_id="r", attempt=1)
        submit = instance_pb2.SessionUp.Submit(
            request=ref, sampling=sampling, prompt_tokens=5, ticket_id="t", **options
        )
        self.head.on_submit(submit)

    async def reserve(self) -> tuple[int, ...]:
        ref = instance_pb2.RequestRef(request_id="r", attempt=1)
        request = instance_pb2.ReservePagesRequest(ticket_id="t", request=ref, epoch=self._epoch)
        return to_tuple((await self.head.ReservePages(request, None)).pages)

    async def want_back(self) -> asyncio.Future[bool]:
        """The broker's answer, to be given."""
        self.scheduler.want_back("t")
        self.head.wake()
        ticket_id, answer = await self.broker.asked.get()
        assert ticket_id == "t"
        return answer


def with_case(follow: Callable[[Case], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            case = Case(group)
            case.submit()
            await follow(case)
            case.head.check_integrity()

    asyncio.run(run())


def test_pages_that_nobody_uses_are_free_and_the_ticket_gets_others() -> None:
    async def follow(case: Case) -> None:
        pages = await case.reserve()
        answer = await case.want_back()
        again = case.group.create_task(case.reserve())  # the prefill side has heard of it before we do
        await asyncio.sleep(0)
        answer.set_result(True)
        taken = case.scheduler.pages.allocate(1)  # by somebody else, as soon as there are
        assert len(await again) == len(pages) == 2
        assert case.scheduler.stats.reservations_cancelled == 1
        assert taken is not None
        case.scheduler.pages.release(taken)

    with_case(follow)


def test_nothing_is_answered_while_it_is_open_whose_the_pages_are() -> None:
    async def follow(case: Case) -> None:
        await case.reserve()
        answer = await case.want_back()
        again = case.group.create_task(case.reserve())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not again.done()
        answer.set_result(True)
        await again

    with_case(follow)


def check_kept(say: Callable[[asyncio.Future[bool]], None]) -> None:
    async def follow(case: Case) -> None:
        pages = await case.reserve()
        say(await case.want_back())
        assert await case.reserve() == pages
        assert case.scheduler.stats.reservations_cancelled == 0

    with_case(follow)


def test_pages_in_use_stay_where_they_are() -> None:
    check_kept(lambda answer: answer.set_result(False))


def test_without_an_answer_pages_stay_where_they_are() -> None:
    error: StagemeshError = Retryable("no answer in time")
    check_kept(lambda answer: answer.set_exception(error))


@pytest.mark.parametrize("waited_s", [-1.0, math.nan, math.inf])
def test_a_request_older_than_time_is_a_violation(waited_s: float) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            with pytest.raises(ProtocolViolation, match="has waited for 0 s or more"):
                Case(group).submit(waited_s=waited_s)

    asyncio.run(run())


def test_conservativeness_can_be_set_while_it_runs() -> None:
    async def follow(case: Case) -> None:
        assert case.head.adjust("schedule_conservativeness", 0.1) == 1.0
        assert case.scheduler.schedule_conservativeness == 0.1
        for wrong in (-0.1, 10.1, math.nan):
            with pytest.raises(Rejected, match="schedule_conservativeness"):
                case.head.adjust("schedule_conservativeness", wrong)
        assert case.scheduler.schedule_conservativeness == 0.1
        with pytest.raises(Rejected, match=r"setting: must be one of schedule_conservativeness, .*, got 'page_size'"):
            case.head.adjust("page_size", 3)
        with pytest.raises(Rejected, match="decode instances cache no prompts"):
            case.head.flush_cache()

    with_case(follow)


def test_waits_and_pressure_are_measured() -> None:
    async def follow(case: Case) -> None:
        await case.reserve()
        values = {(sample.metric, sample.labels): sample.value for sample in case.head.measure()}
        assert values[metrics.WAITING_SEQUENCES, ("kv",)] == 1
        assert values[metrics.WAITING_SEQUENCES, ("pages",)] == 0
        for longest in (values[metrics.LONGEST_WAIT, ("kv",)], values[metrics.OLDEST_SEQUENCE, ("reserved",)]):
            assert isinstance(longest, float)
            assert longest > 0
        assert values[metrics.HOST_PAGES, ("free",)] == values[metrics.RETRACTIONS, ()] == 0

    with_case(follow)


def test_host_memory_is_counted_in_pages_of_the_widest_stage() -> None:
    info = instance_of("d", DECODE, sizes=(1, 2, 1), num_pages=16)
    pools = [replace(stage, pool=replace(stage.pool, length=16 * 100 * len(stage.layers))) for stage in info.stages]
    assert replace(info, stages=tuple(pools)).widest_page_bytes == 200


def test_what_a_router_says_of_a_request_reaches_the_scheduler() -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            case = Case(group)
            case.submit(priority=-3, waited_s=1000.0, recompute=True)
            other = RequestRef("s", 1)
            case.scheduler.submit(other, cast("Any", SimpleNamespace(max_tokens=4)), 5, "u")
            first, second = case.scheduler.sequences
            assert (first.priority, first.recompute) == (-3, True)
            assert (second.priority, second.recompute) == (0, False)
            assert second.arrived_s - first.arrived_s >= 1000.0

    asyncio.run(run())


def test_a_head_that_drains_does_not_wait_for_pages_in_quarantine() -> None:
    async def follow(case: Case) -> None:
        await case.reserve()
        close = instance_pb2.CloseTicketRequest(ticket_id="t", reason="so", quiesced=False, epoch=case._epoch)
        await case.head.CloseTicket(close, None)
        await asyncio.sleep(0)
        assert case.head.held["pages_quarantined"] == 2
        async with asyncio.timeout(5):
            await case.head.idle()

    with_case(follow)


def test_a_head_is_closed_only_when_nothing_is_held_or_may_be_written_to() -> None:
    async def follow(case: Case) -> None:
        with pytest.raises(Retryable, match="there are 1 sequences"):
            case.head.close()
        await case.reserve()
        close = instance_pb2.CloseTicketRequest(ticket_id="t", reason="so", quiesced=False, epoch=case._epoch)
        await case.head.CloseTicket(close, None)
        await case.head.idle()
        with pytest.raises(Retryable, match="there are 2 pages_quarantined"):
            case.head.close()
        close.quiesced = True
        await case.head.CloseTicket(close, None)
        case.head.close()
        with pytest.raises(Cancelled, match="has ended"):
            await case.reserve()

    with_case(follow)
