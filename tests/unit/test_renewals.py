"""Which instance is to end for its writes in doubt, and when: never all of a role at once, the only one at its ease."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.members import Members
from stagemesh.services.broker.renewals import (
    BACK_S,
    FIRST_PAUSE_S,
    IDLE_S,
    LATE_S,
    MOST_PAUSE_S,
    RECENT_S,
    Reason,
    Renew,
    Renewals,
    Spare,
    Standing,
)
from stagemesh.services.broker.renewing import Renewing
from stagemesh.services.broker.ticket import Ticket, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.config import BrokerSection
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.errors import PeerLost, Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.tasks import Tasks
from tests.support.instances import DECODE, PREFILL, instance_of

P0, P1 = instance_of("p0", PREFILL), instance_of("p1", PREFILL)
D = instance_of("d", DECODE, num_pages=20)
IN_DOUBT = WriterOutcome((), "broken", in_doubt=True)


def doubtful(book: TicketBook, prefill: InstanceInfo = P0, pages: int = 1) -> Ticket:
    """A ticket whose second writer does not know what arrives, since second 0."""
    ticket = book.open(RequestRef(f"r{len(book)}", 0), prefill, D, pages * D.manifest.page_size, 4)
    book.reserved(ticket)
    book.fill(ticket)
    book.report(ticket, 0, WriterOutcome((), "cancelled"))
    book.report(ticket, 1, IN_DOUBT)
    ticket.since_s = 0.0
    return ticket


def busy(*infos: InstanceInfo) -> list[Standing]:
    return [Standing(info, 0.0) for info in (*infos, D)]


def later(info: InstanceInfo, epoch: int = 2, *, accepting: bool = True) -> InstanceInfo:
    return instance_of(info.ref.name, info.role, epoch=epoch, accepting=accepting)


def test_it_ends_at_once_where_another_of_its_role_serves() -> None:
    book, policy = TicketBook("t"), Renewals(1.0)
    assert policy.look([], busy(P0, P1), 0.0) is None
    ids = tuple(doubtful(book, pages=pages).ticket_id for pages in (2, 3))
    assert policy.look(book.unproven(), busy(P0, P1), 0.0) == Renew(P0.ref, Reason.OTHERS, ids, 5)


def test_several_are_never_away_at_once() -> None:
    book, policy = TicketBook("t"), Renewals(0.0)
    doubtful(book, P0)
    doubtful(book, P1)
    first = policy.look(book.unproven(), busy(P0, P1), 0.0)
    assert isinstance(first, Renew)
    assert first.ref == P0.ref
    for here in ((P0, P1), (later(P0, 1, accepting=False), P1), (P1,), (later(P0, accepting=False), P1)):
        assert policy.look(book.unproven(), busy(*here), 5.0) is None
    assert policy.look(book.unproven(), busy(later(P0), P1), 6.0) is None, "a pause"
    second = policy.look(book.unproven(), busy(later(P0), P1), 6.0 + FIRST_PAUSE_S)
    assert isinstance(second, Renew)
    assert (second.ref, second.reason) == (P1.ref, Reason.OTHERS)


def test_one_that_does_not_come_back_is_not_waited_for_forever() -> None:
    book, policy = TicketBook("t"), Renewals(1.0)
    doubtful(book, P0)
    doubtful(book, P1)
    assert policy.look(book.unproven(), busy(P0, P1), 0.0) is not None
    assert policy.look(book.unproven(), busy(P1), BACK_S) is None
    assert policy.look(book.unproven(), busy(P1), BACK_S + 1) is None
    assert policy.look(book.unproven(), busy(P1), BACK_S + 9) == Spare(P1.ref, 1), "the only one that is left"


def test_pauses_double_while_connections_go_on_breaking() -> None:
    policy, now_s, pauses, epoch = Renewals(1.0), 0.0, [], 1
    for _ in range(8):
        one = later(P0, epoch)
        tickets = [doubtful(TicketBook(f"t{epoch}"), one)]
        assert isinstance(policy.look(tickets, busy(one, P1), now_s), Renew)
        epoch += 1
        now_s, one = now_s + 1, later(P0, epoch)
        tickets = [doubtful(TicketBook(f"t{epoch}"), one)]
        assert policy.look(tickets, busy(one, P1), now_s) is None
        pauses.append(policy._not_before_s - now_s)
        now_s = policy._not_before_s
    assert pauses == [min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(8)]
    one = later(P0, epoch)
    now_s += RECENT_S
    assert isinstance(policy.look([doubtful(TicketBook("u"), one)], busy(one, P1), now_s), Renew)
    assert policy.look([], busy(later(P0, epoch + 1), P1), now_s + 1) is None
    assert policy._not_before_s == now_s + 1 + FIRST_PAUSE_S, "forgotten"


def test_the_only_one_goes_when_it_is_idle_and_that_it_stays_is_said_once() -> None:
    book, policy = TicketBook("t"), Renewals(0.1)
    doubtful(book, pages=2)
    assert policy.look(book.unproven(), busy(P0), 0.0) == Spare(P0.ref, 2)
    assert policy.look(book.unproven(), busy(P0), 1.0) is None
    waiting = [Standing(P0, IDLE_S - 0.1), Standing(D, 0.0)]
    assert policy.look(book.unproven(), waiting, 2.0) is None
    due = policy.look(book.unproven(), [Standing(P0, IDLE_S), Standing(D, 0.0)], 3.0)
    assert isinstance(due, Renew)
    assert due.reason is Reason.IDLE


def test_the_only_one_goes_though_busy_once_it_holds_too_much_of_a_pool() -> None:
    book, policy = TicketBook("t"), Renewals(0.1)
    doubtful(book, pages=2)
    assert isinstance(policy.look(book.unproven(), busy(P0), 0.0), Spare)
    doubtful(book, pages=1)
    due = policy.look(book.unproven(), busy(P0), 1.0)
    assert isinstance(due, Renew)
    assert (due.reason, due.pages) == (Reason.SHARE, 3)
    never = Renewals(1.0)
    doubtful(book, pages=17)
    assert isinstance(never.look(book.unproven(), busy(P0), 1.0), Spare)


@pytest.mark.parametrize("other", [D, later(P1, accepting=False)], ids=["of another role", "drained"])
def test_whom_nothing_can_be_sent_to_does_not_stand_in(other: InstanceInfo) -> None:
    book = TicketBook("t")
    doubtful(book)
    assert isinstance(Renewals(1.0).look(book.unproven(), [Standing(P0, 0.0), Standing(other, 0.0)], 0.0), Spare)


def test_who_is_drained_already_is_left_alone() -> None:
    book = TicketBook("t")
    doubtful(book)
    assert Renewals(0.0).look(book.unproven(), busy(later(P0, 1, accepting=False), P1), 0.0) is None


def test_a_later_epoch_is_not_blamed_before_the_report_of_the_exit_is_late_and_then_once() -> None:
    book, policy, now = TicketBook("t"), Renewals(1.0), later(P0)
    doubtful(book)
    assert policy.look(book.unproven(), busy(now, P1), LATE_S) is None
    due = policy.look(book.unproven(), busy(now, P1), LATE_S + 1)
    assert isinstance(due, Renew)
    assert due.ref == now.ref
    assert policy.look(book.unproven(), busy(later(P0, 3), P1), 10 * LATE_S) is None
    assert policy.look(book.unproven(), busy(later(P0, 3), P1), 20 * LATE_S) is None, "no exit is ever reported"


class Heads:
    """Take what they are told, as `answers` say."""

    def __init__(self, *answers: Exception) -> None:
        self._answers = list(answers)
        self.told: list[InstanceRef] = []

    async def renew(self, ref: InstanceRef, reason: str) -> None:
        assert reason == "writes in doubt: tickets 1, pages that wait for its end 2"
        self.told.append(ref)
        if self._answers:
            raise self._answers.pop(0)

    def add(self, info: object) -> None: ...


class Shell:
    """A broker's part, with two prefill instances."""

    def __init__(self, *answers: Exception) -> None:
        log, self.tasks, self.fences = Log(logging.getLogger(__name__)), Tasks(), Fences()
        self.events, self.book, self.heads = Events("m", "b"), TicketBook("t"), Heads(*answers)
        ignore = cast("Any", lambda *_: None)
        self.members = Members(
            "b",
            self.tasks,
            log,
            self.fences,
            on_joined=ignore,
            on_lost=ignore,
            on_router_gone=ignore,
            events=self.events,
        )
        self.members.heads = cast("Any", self.heads)
        for info in (P0, P1, D):
            self.members._report(info)
        config = cast("Any", SimpleNamespace(broker=BrokerSection(listen="unix:b")))
        self.renewing = Renewing(
            config, self.members, self.book, self.fences, events=self.events, spawn=self.tasks.spawn, log=log
        )
        self.ticket = doubtful(self.book, pages=2)

    async def look(self, now_s: float = 0.0) -> None:
        self.renewing._look(now_s)
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def counts(self) -> dict[str, float]:
        return {sample.labels[0]: float(cast("Any", sample.value)) for sample in self.renewing.measure()}


def with_shell(shell: Shell, follow: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            running = group.create_task(shell.tasks.run())
            await asyncio.sleep(0)
            await follow(shell)
            running.cancel()

    asyncio.run(run())


def test_an_instance_is_told_and_everybody_hears_of_it() -> None:
    async def follow(shell: Shell) -> None:
        await shell.look()
        assert shell.heads.told == [P0.ref]
        (said,) = [event for event in shell.events.recent if event.event is EventKind.RENEWING]
        assert (said.name, said.details) == ("p0", {"epoch": 1, "tickets": 1, "pages": 2, "reason": "others serve"})
        assert shell.counts == {"others serve": 1, "idle": 0, "too many pages": 0}
        await shell.look()
        assert len(shell.heads.told) == 1

    with_shell(Shell(PeerLost("it has ended by now")), follow)


def test_nobody_is_told_who_is_reaped() -> None:
    async def follow(shell: Shell) -> None:
        shell.fences.reaped(P0.ref, None)
        await shell.look()
        assert not shell.heads.told

    with_shell(Shell(), follow)


def test_one_that_refuses_is_told_again_after_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    async def follow(shell: Shell) -> None:
        await shell.look()
        assert "an instance does not end" in caplog.text
        await shell.look()
        assert len(shell.heads.told) == 1
        shell.renewing._policy._not_before_s = 0.0
        await shell.look()
        assert shell.heads.told == [P0.ref, P0.ref]

    with_shell(Shell(Rejected("epoch", "is another")), follow)
