"""Pages that the decode side takes back: the broker never says that nobody writes to them while somebody may."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stagemesh.services.broker.service import BrokerService
from stagemesh.services.broker.ticket import Ticket
from stagemesh.services.decode.head import DecodeHead
from stagemesh.services.prefill.head import PrefillHead
from stagemesh.shared.codec.arrays import to_tuple
from stagemesh.shared.codec.mesh import ref_to_pb
from stagemesh.shared.config import MeshSection, MetricsSection, NatsSection, TlsSection
from stagemesh.shared.config.sections import BrokerSection
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.errors import Cancelled, Retryable, StagemeshError
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.runtime.notify import Notifier
from tests.support.instances import DECODE, PREFILL, instance_of


class Heads:
    """Answers a reservation when it is told to."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[tuple[int, ...]]] = []
        self.timeouts_s: list[float] = []
        self.asked = asyncio.Event()

    def add(self, info: object) -> None: ...

    async def reserve(self, ticket: Ticket, timeout_s: float) -> tuple[int, ...]:
        self.answers.append(asyncio.get_running_loop().create_future())
        self.timeouts_s.append(timeout_s)
        self.asked.set()
        return await self.answers[-1]


class Caller:
    """Of a broker with one pair of instances and one ticket between them."""

    context: Any = SimpleNamespace(time_remaining=lambda: None)

    def __init__(self) -> None:
        mesh = MeshSection(run_dir="/run")
        shared = {"metrics": MetricsSection(), "tls": TlsSection(), "broker": BrokerSection(listen="")}
        sections = {"mesh": mesh, "nats": NatsSection(), **shared}
        config = cast("Any", SimpleNamespace(**sections, instances=()))
        self.broker, self.heads = BrokerService(config, Notifier(None), Log(logging.getLogger("test"))), Heads()
        self.broker._members.heads = cast("Any", self.heads)
        pair = instance_of("p", PREFILL), instance_of("d", DECODE)
        for info in pair:
            self.broker._members._report(info)
        self.open = broker_pb2.OpenTicketRequest(
            request_id="r", prefill=ref_to_pb(pair[0].ref), decode=ref_to_pb(pair[1].ref), prompt_tokens=8, max_tokens=4
        )
        self.ticket_id = ""

    async def start(self) -> None:
        self.ticket_id = (await self.broker.OpenTicket(self.open, self.context)).ticket_id

    async def reserve(self) -> tuple[int, ...]:
        request = broker_pb2.ReserveRequest(ticket_id=self.ticket_id)
        return to_tuple((await self.broker.Reserve(request, self.context)).pages)

    async def unreserve(self) -> bool:
        request = broker_pb2.UnreserveRequest(ticket_id=self.ticket_id)
        return (await self.broker.Unreserve(request, self.context)).accepted

    async def fill(self) -> bool:
        request = broker_pb2.FillRequest(ticket_id=self.ticket_id)
        return not (await self.broker.Fill(request, self.context)).taken_back

    async def reserved(self, *pages: int) -> None:
        """Asks for pages and is given these; while the answer is on its way they are not given back."""
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self.reserve())
            await self.heads.asked.wait()
            self.heads.asked.clear()
            self.heads.answers.pop().set_result(pages)
            assert not await self.unreserve()
        assert asking.result() == pages


def test_pages_are_given_back_only_between_the_answer_and_the_first_write() -> None:
    async def run() -> None:
        caller = Caller()
        await caller.start()
        await caller.reserved(1, 2)
        assert await caller.unreserve()
        assert not await caller.fill()
        await caller.reserved(3, 4)
        assert await caller.fill()
        assert not await caller.unreserve()

    asyncio.run(run())


def test_pages_of_a_ticket_that_is_closed_are_another_matter() -> None:
    async def run() -> None:
        caller = Caller()
        caller.ticket_id = "never opened"
        assert not await caller.unreserve()

    asyncio.run(run())


class FakeBroker:
    """Refuses the first announcement of writes, and says what it likes about pages that are wanted back."""

    def __init__(self, verdict: bool | StagemeshError = False) -> None:
        self.verdict, self.fills = verdict, 0

    async def fill(self, ticket_id: str) -> bool:
        self.fills += 1
        return self.fills > 1

    async def unreserve(self, ticket_id: str) -> bool:
        if isinstance(self.verdict, StagemeshError):
            raise self.verdict
        return self.verdict


def context(info: InstanceInfo, broker: FakeBroker) -> Any:
    """Tasks that a head starts are not run: the tests here call what they would."""
    log = Log(logging.getLogger("test"))
    return SimpleNamespace(info=info, log=log, broker=broker, spawn=lambda task: task.close(), vocab_size=100)


def test_a_prefill_head_asks_again_for_pages_that_were_taken_back() -> None:
    async def run() -> list[tuple[str, bool]]:
        scheduler = PrefillScheduler(
            num_pages=8, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1
        )
        broker, seen = FakeBroker(), []
        head = PrefillHead(context(instance_of("p", PREFILL), broker), scheduler)
        tokens = np.arange(4, dtype=np.int64)
        scheduler.submit(RequestRef("r", 0), SamplingParams(max_tokens=4), tokens, "t", "d")
        for pages in ((1,), (2,)):
            assert scheduler.poll().reserve == ["t"]
            scheduler.reserved("t", pages, ())
            assert scheduler.poll().fill == ["t"]
            await head._fill("t")
            (sequence,) = scheduler.sequences
            seen.append((sequence.state.value, sequence.startable))
        return seen

    assert asyncio.run(run()) == [("waiting", False), ("reserved", True)]


@pytest.mark.parametrize(
    ("verdict", "state"), [(True, "waiting"), (False, "reserved"), (Retryable("the broker is gone"), "reserved")]
)
def test_a_decode_head_gives_up_pages_only_on_the_brokers_word(verdict: bool | StagemeshError, state: str) -> None:
    async def run() -> str:
        scheduler = DecodeScheduler(num_pages=8, page_size=4, num_microbatches=1, max_running=4)
        head = DecodeHead(context(instance_of("d", DECODE), FakeBroker(verdict)), scheduler)
        scheduler.submit(RequestRef("r", 0), SamplingParams(max_tokens=4), 4, "t")
        scheduler.reserve("t", RequestRef("r", 0))
        scheduler.poll()
        (sequence,) = scheduler.sequences
        sequence.asked_back = True
        await head._take_back("t")
        scheduler.check_integrity()
        assert not sequence.asked_back
        return sequence.state.value

    assert asyncio.run(run()) == state


def test_the_time_that_a_head_is_given_counts_from_when_it_is_asked() -> None:
    """Not from when the call came, which may have waited for what a broker that was started anew must learn first."""

    async def run() -> None:
        caller, left = Caller(), [1.0]
        await caller.start()
        context = SimpleNamespace(time_remaining=lambda: left[0])
        known, gate = caller.broker._recovery.ticket, asyncio.Event()

        async def late(ticket_id: str) -> Ticket:
            await gate.wait()
            return await known(ticket_id)

        caller.broker._ticketing._recovery = cast("Any", SimpleNamespace(ticket=late))
        request = broker_pb2.ReserveRequest(ticket_id=caller.ticket_id)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(caller.broker.Reserve(request, context))
            await asyncio.sleep(0)
            left[0] = 0.5
            gate.set()
            await caller.heads.asked.wait()
            caller.heads.answers.pop().set_result((1,))
        assert to_tuple(asking.result().pages) == (1,)
        assert caller.heads.timeouts_s == [0.5]

    asyncio.run(run())


async def asked_twice() -> tuple[Caller, asyncio.Task[tuple[int, ...]], asyncio.Task[tuple[int, ...]]]:
    """A prefill instance whose connection has broken asks for the same pages again."""
    caller, calls = Caller(), []
    await caller.start()
    for _ in range(2):
        caller.heads.asked.clear()
        calls.append(asyncio.create_task(caller.reserve()))
        await caller.heads.asked.wait()
    return caller, calls[0], calls[1]


def test_a_second_reservation_keeps_the_guard_and_the_first_one_is_told_nothing() -> None:
    """The decode head ends the first question."""

    async def main() -> None:
        caller, first, second = await asked_twice()
        caller.heads.answers[0].set_exception(Cancelled("asked for again"))
        with pytest.raises(Cancelled, match="asked for again"):
            await first
        assert not await caller.unreserve()
        caller.heads.answers[1].set_result((3, 4))
        assert await second == (3, 4)
        assert await caller.unreserve()

    asyncio.run(main())


def test_an_answer_that_a_later_question_has_overtaken_is_not_told() -> None:
    async def main() -> None:
        caller, first, second = await asked_twice()
        caller.heads.answers[1].set_result((3, 4))
        assert await second == (3, 4)
        assert await caller.unreserve()
        caller.heads.answers[0].set_result((3, 4))
        with pytest.raises(Cancelled, match="asked for again"):
            await first

    asyncio.run(main())
