"""The tickets of KV transfers: pieces that are identified, failures in every state, and what counts as proof."""

from __future__ import annotations

import pytest

from stagemesh.services.broker.ticket import Action, Close, PieceSpan, Ticket, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.layers import Leg
from stagemesh.shared.errors import Cancelled, ProtocolViolation
from stagemesh.shared.fsm.ticket import TicketState
from tests.support.instances import DECODE, PREFILL, instance_of
from tests.support.spans import spans_of
from tests.support.ticket_lives import NUM_PAGES, all_of, open_ticket


def filling(book: TicketBook) -> Ticket:
    ticket = open_ticket(book)
    book.reserved(ticket)
    book.fill(ticket)
    return ticket


def kinds(actions: list[Action]) -> list[tuple[str, bool] | str]:
    """`commit` or `verify`, or whom a close tells and whether it says that nothing is in flight."""
    return [(a.instance.name, a.quiesced) if isinstance(a, Close) else type(a).__name__.lower() for a in actions]


def test_a_ticket_knows_its_legs_and_pages() -> None:
    ticket = open_ticket(TicketBook("x"))
    assert (ticket.ticket_id, ticket.num_pages, ticket.num_writers) == ("x-1", NUM_PAGES, 2)
    assert [(leg.writer, leg.target) for leg in ticket.legs] == [(0, 0), (0, 1), (1, 1)]
    assert isinstance(ticket.legs[0], Leg)


def test_it_commits_with_the_last_report_of_every_piece() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    assert book.report(ticket, 1, all_of(ticket, 1)) == []
    assert kinds(book.report(ticket, 0, all_of(ticket, 0))) == ["commit"]
    assert ticket.state is TicketState.COMMITTED
    book.release(ticket)
    assert (len(book), book.closed_by_outcome) == (0, {"committed": 1, "failed": 0})


SHORT = [
    pytest.param([(0, 0, 3), (1, 0, 2)], id="a page is missing"),
    pytest.param([(0, 0, 3), (1, 0, 2), (1, 0, 1)], id="a page twice does not make up for one missing"),
    pytest.param([(0, 0, 3), (0, 0, 3)], id="a leg twice does not make up for one missing"),
    pytest.param([(0, 0, 3), (1, 0, 1), (1, 2, 3)], id="a hole"),
    pytest.param([(0, 0, 3), (1, 1, 4)], id="a page that the prompt has not"),
    pytest.param([], id="nothing"),
]


@pytest.mark.parametrize("spans", SHORT)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_pieces_are_identified_not_counted(spans: list[tuple[int, int, int]], first: bool) -> None:
    book = TicketBook("x")
    ticket = filling(book)
    reports = [(0, WriterOutcome(spans_of(spans))), (1, all_of(ticket, 1))]
    actions: list[Action] = []
    for writer, outcome in reports if first else reversed(reports):
        actions += book.report(ticket, writer, outcome)
    assert kinds(actions) == [("p", False), ("d", False), ("d", True)]
    assert ticket.reason == f"stage 0 has not written all pages to stage {1 if spans else 0}"
    assert not ticket.lost, "it would be so again"
    assert len(book) == 0


def test_spans_may_come_in_pieces_and_in_any_order() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    book.report(ticket, 0, WriterOutcome(spans_of([(1, 2, 3), (0, 0, 3), (1, 0, 2), (1, 1, 3)])))
    assert kinds(book.report(ticket, 1, all_of(ticket, 1))) == ["commit"]


@pytest.mark.parametrize("steps", [0, 1], ids=["opened", "reserved"])
def test_before_the_first_write_a_failure_closes_at_once(steps: int) -> None:
    book = TicketBook("x")
    ticket = open_ticket(book)
    if steps:
        book.reserved(ticket)
    actions = book.fail(ticket, "no luck")
    assert sorted(map(str, kinds(actions))) == ["('d', True)", "('p', True)"]
    assert (ticket.state, ticket.reason, len(book)) == (TicketState.CLOSED, "no luck", 0)
    with pytest.raises(Cancelled, match=ticket.ticket_id):
        book.get(ticket.ticket_id)


def test_while_it_is_written_a_failure_tells_both_and_waits_for_every_writer() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    assert kinds(book.fail(ticket, "no luck")) == [("p", False), ("d", False)]
    assert kinds(book.fail(ticket, "again")) == []
    assert ticket.reason == "no luck"
    assert book.report(ticket, 0, WriterOutcome((), "cancelled")) == []
    assert kinds(book.report(ticket, 1, all_of(ticket, 1))) == [("d", True)]
    assert book.closed_by_outcome["failed"] == 1


def test_one_writer_that_failed_fails_it_and_the_others_are_waited_for() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    assert kinds(book.report(ticket, 0, WriterOutcome((), "broken"))) == [("p", False), ("d", False)]
    assert ticket.reason == "prefill stage 0: broken"
    assert ticket.lost, "another pair may do better"
    assert kinds(book.report(ticket, 1, all_of(ticket, 1))) == [("d", True)]


def test_the_heads_word_that_nothing_was_begun_is_proof() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    assert kinds(book.fail(ticket, "aborted", quiescent=True)) == [("p", False), ("d", False), ("d", True)]
    book = TicketBook("x")
    ticket = filling(book)
    book.fail(ticket, "aborted")
    assert kinds(book.fail(ticket, "aborted", quiescent=True)) == [("d", True)]


def test_a_writer_in_doubt_keeps_the_pages_in_quarantine() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    book.report(ticket, 0, WriterOutcome((), "timed out", in_doubt=True))
    assert book.report(ticket, 1, all_of(ticket, 1)) == []
    assert ticket.state is TicketState.QUIESCING


def test_the_heads_word_does_not_remove_a_writers_doubt() -> None:
    """The head knows that the writer will write no more, not that what it wrote has arrived: a writer settles in its
    head also after a failure that it cannot explain."""
    book = TicketBook("x")
    ticket = filling(book)
    book.report(ticket, 0, WriterOutcome((), "timed out", in_doubt=True))
    book.report(ticket, 1, all_of(ticket, 1))
    assert kinds(book.fail(ticket, "timed out", quiescent=True)) == []
    assert ticket.state is TicketState.QUIESCING


def test_a_committed_ticket_fails_no_more() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    for writer in (0, 1):
        book.report(ticket, writer, all_of(ticket, writer))
    assert book.fail(ticket, "late") == []
    assert book.lose(ticket.prefill) == []
    assert ticket.state is TicketState.COMMITTED
    assert kinds(book.lose(ticket.decode)) == [("p", True)]
    book.release(ticket)  # the answer to the commit, or not: nothing is left to be released
    assert book.closed_by_outcome == {"committed": 0, "failed": 1}


def test_losing_an_instance_fails_its_tickets_and_no_other() -> None:
    book = TicketBook("x")
    mine, other = filling(book), filling(book)
    other.prefill = other.decode = InstanceRef("else", 1)
    assert kinds(book.lose(mine.prefill)) == [("p", False), ("d", False)]
    assert (mine.state, other.state) == (TicketState.QUIESCING, TicketState.FILLING)
    assert book.lose(InstanceRef("d", 99)) == []
    assert kinds(book.lose(mine.decode)) == [("p", True)]
    assert (len(book), book.closed_by_outcome["failed"]) == (1, 1)


def test_announcements_may_come_twice() -> None:
    book = TicketBook("x")
    ticket = open_ticket(book)
    book.reserved(ticket)
    book.reserved(ticket)
    book.fill(ticket)
    book.fill(ticket)
    assert ticket.state is TicketState.FILLING


def test_a_report_that_cannot_be_is_refused() -> None:
    book = TicketBook("x")
    ticket = open_ticket(book)
    with pytest.raises(ProtocolViolation, match="no writer reports now"):
        book.report(ticket, 0, all_of(ticket, 0))
    with pytest.raises(ProtocolViolation, match="no pages yet"):
        book.fill(ticket)
    book.reserved(ticket)
    book.fill(ticket)
    for writer in (-1, 2):
        with pytest.raises(ProtocolViolation, match=f"no writer {writer}"):
            book.report(ticket, writer, WriterOutcome(()))


def test_tickets_are_counted_by_state() -> None:
    book = TicketBook("x")
    open_ticket(book)
    filling(book)
    counts = book.by_state()
    assert (counts["opened"], counts["filling"], sum(counts.values()), len(book)) == (1, 1, 2, 2)


def test_a_router_that_is_gone_takes_the_tickets_with_it_that_only_it_knows() -> None:
    book, pair = TicketBook("t"), (instance_of("p", PREFILL), instance_of("d", DECODE))
    routers = ("gone", "here", "gone")
    mine, others, asked = (book.open(RequestRef(r, at), *pair, 8, 4, r) for at, r in enumerate(routers))
    book.reserved(asked)
    assert {action.ticket.ticket_id for action in book.abandon("gone")} == {mine.ticket_id}
    assert (mine.state, others.state, asked.state) == (TicketState.CLOSED, TicketState.OPENED, TicketState.RESERVED)
    assert len(book) == 2


def test_nothing_can_be_written_before_there_are_pages() -> None:
    book = TicketBook("t")
    with pytest.raises(ProtocolViolation, match="has no pages yet"):
        book.fill(open_ticket(book))


def state_of(ticket: Ticket) -> str:
    return ticket.state.value


def test_pages_are_taken_back_until_a_write_is_announced() -> None:
    book = TicketBook("t")
    ticket = open_ticket(book)
    book.reserved(ticket)
    assert book.unreserve(ticket)
    assert book.unreserve(ticket)  # its first answer was lost
    assert state_of(ticket) == "opened"
    assert not book.fill(ticket)
    assert state_of(ticket) == "opened"
    book.reserved(ticket)  # asked for again
    assert book.fill(ticket)
    assert not book.unreserve(ticket)
    assert state_of(ticket) == "filling"
    book.fail(ticket, "no luck")
    assert not book.unreserve(ticket)
    assert state_of(ticket) == "quiescing"


def test_a_ticket_whose_pages_were_taken_back_fails_at_once() -> None:
    book = TicketBook("t")
    ticket = open_ticket(book)
    book.reserved(ticket)
    book.unreserve(ticket)
    assert sorted(map(str, kinds(book.fail(ticket, "no luck")))) == ["('d', True)", "('p', True)"]
    assert len(book) == 0


@pytest.mark.parametrize("first", [0, 1])
def test_a_report_of_four_billion_pages_costs_nothing(first: int) -> None:
    book = TicketBook("x")
    ticket = filling(book)
    book.report(ticket, 1, all_of(ticket, 1))
    endless = [(target, first, (1 << 32) - 1) for target in (0, 1)] * 3
    assert "commit" not in kinds(book.report(ticket, 0, WriterOutcome(spans_of(endless))))


def test_asked_again_for_the_same_it_opens_no_second_ticket() -> None:
    book, pair = TicketBook("t"), (instance_of("p", PREFILL), instance_of("d", DECODE))
    ticket = book.open(RequestRef("r", 1), *pair, 8, 4, "router")
    assert book.open(RequestRef("r", 1), *pair, 8, 4, "router") is ticket
    assert book.open(RequestRef("r", 2), *pair, 8, 4, "router") is not ticket
    assert book.open(RequestRef("r", 1), *pair, 8, 4, "another") is not ticket
    book.fail(ticket, "no luck")
    assert book.open(RequestRef("r", 1), *pair, 8, 4, "router") is not ticket


def test_a_report_may_come_again_after_the_commit() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    book.report(ticket, 1, all_of(ticket, 1))
    assert kinds(book.report(ticket, 0, all_of(ticket, 0))) == ["commit"]
    assert book.report(ticket, 0, all_of(ticket, 0)) == []
    assert ticket.state is TicketState.COMMITTED


def summed(ticket: Ticket, writer: int) -> WriterOutcome:
    """As `all_of`, with a checksum a page."""
    spans = [
        PieceSpan(leg.target, 0, ticket.num_pages, tuple(range(100 * leg.target, 100 * leg.target + ticket.num_pages)))
        for leg in ticket.legs
        if leg.writer == writer
    ]
    return WriterOutcome(tuple(spans))


def verifying(book: TicketBook) -> Ticket:
    ticket = filling(book)
    assert book.report(ticket, 1, summed(ticket, 1)) == []
    assert kinds(book.report(ticket, 0, summed(ticket, 0))) == ["verify"]
    assert ticket.state is TicketState.FILLING
    return ticket


def test_what_writers_have_summed_is_verified_before_it_commits() -> None:
    book = TicketBook("x")
    ticket = verifying(book)
    seen = [(check.span.target, check.layers.lo, check.layers.hi, check.span.crcs) for check in ticket.checks]
    assert seen == [(0, 0, 1, (0, 1, 2)), (1, 1, 2, (100, 101, 102)), (1, 2, 4, (100, 101, 102))]
    assert book.report(ticket, 0, summed(ticket, 0)) == [], "a report that comes twice asks once"
    assert kinds(book.verified(ticket, "")) == ["commit"]
    assert book.verified(ticket, "too late") == []


def test_a_mismatch_fails_the_ticket_with_its_reason_and_its_pages_are_free_at_once() -> None:
    book = TicketBook("x")
    ticket = verifying(book)
    assert kinds(book.verified(ticket, "page 3 is not what was sent")) == [("p", False), ("d", False), ("d", True)]
    assert (ticket.state, ticket.reason, ticket.lost) == (TicketState.CLOSED, "page 3 is not what was sent", True)
    assert len(book) == 0


def test_a_ticket_that_fails_while_it_is_verified_stays_failed() -> None:
    book = TicketBook("x")
    ticket = verifying(book)
    assert kinds(book.fail(ticket, "aborted")) == [("p", False), ("d", False), ("d", True)]
    assert book.verified(ticket, "") == []
    assert ticket.state is TicketState.CLOSED


def test_a_heads_word_on_a_ticket_whose_decode_instance_was_lost_meanwhile_changes_nothing() -> None:
    book = TicketBook("x")
    ticket = filling(book)
    book.fail(ticket, "aborted")
    assert kinds(book.lose(ticket.decode)) == [("p", True)]
    assert book.fail(ticket, "aborted", quiescent=True) == []
    assert (len(book), book.closed_by_outcome) == (0, {"committed": 0, "failed": 1})
