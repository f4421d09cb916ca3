"""What a broker that was started again makes of what heads know: every pair of states, and who is waited for."""

from __future__ import annotations

from itertools import product

import pytest

from stagemesh.services.broker.gathering import VERDICTS, Absence, Found, Gathering, Verdict, check_leg
from stagemesh.services.broker.rebuild import rebuild
from stagemesh.services.broker.ticket import Close
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.codec.tickets import leg_from_pb, leg_to_pb
from stagemesh.shared.core.directory import Role
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.fsm.ticket import TicketState
from tests.support.instances import DECODE, PREFILL, instance_of

P, D = instance_of("p", PREFILL), instance_of("d", DECODE, sizes=(1, 3))
REQUEST = RequestRef("r", 3)
PREFILL_SIDES = (LegState.WAITING, LegState.RESERVED, LegState.FILLING, LegState.ENDING, *Absence)
DECODE_SIDES = (LegState.WAITING, LegState.RESERVED, LegState.COMMITTED, LegState.ENDING, *Absence)


def leg(
    peer: InstanceRef, state: LegState, pages: tuple[int, ...] = (4, 5, 6), doubtful: tuple[int, ...] = ()
) -> TicketLeg:
    pages = () if state is LegState.WAITING else pages
    return TicketLeg("old-1", REQUEST, peer, 10, 8, state, pages, frozenset(doubtful))


def gather(p_side: LegState | Absence, d_side: LegState | Absence) -> Gathering:
    gathering = Gathering({"p", "d", "else"})
    if p_side is not Absence.GONE:
        legs = [leg(D.ref, p_side)] if isinstance(p_side, LegState) else []
        gathering.join(P.ref, Role.PREFILL, legs)
    if d_side is not Absence.GONE:
        legs = [leg(P.ref, d_side)] if isinstance(d_side, LegState) else []
        gathering.join(D.ref, Role.DECODE, legs)
    return gathering


PAIRS = [pair for pair in product(PREFILL_SIDES, DECODE_SIDES) if not all(isinstance(side, Absence) for side in pair)]


def test_every_pair_has_a_verdict_and_no_other() -> None:
    assert set(VERDICTS) == set(PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_ticket_is_found_once_both_sides_are_known(pair: tuple[LegState | Absence, LegState | Absence]) -> None:
    gathering = gather(*pair)
    waits = Absence.GONE in pair
    if waits:
        assert (gathering.take(), len(gathering)) == ([], 1)
        gathering.end()
    (found,) = gathering.take()
    assert (found.verdict, found.prefill, found.decode) == (VERDICTS[pair], P.ref, D.ref)
    assert (gathering.take(), len(gathering)) == ([], 0)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pages_that_may_be_written_are_never_told_free_at_once(
    pair: tuple[LegState | Absence, LegState | Absence],
) -> None:
    gathering = gather(*pair)
    gathering.end()
    (found,) = gathering.take()
    book = TicketBook("new")
    actions = rebuild(book, found, P if pair[0] is not Absence.GONE else None, D, 2)
    frees = [a for a in actions if isinstance(a, Close) and a.instance == D.ref and a.quiesced]
    if pair[1] in (LegState.RESERVED, LegState.ENDING):
        assert not frees
        assert len(book) == 1, "somebody has to see to the pages"
    if pair[0] is LegState.FILLING and pair[1] is LegState.RESERVED:
        assert book.get("old-1").state is TicketState.FILLING


def test_all_instances_that_there_are_to_be_end_the_wait() -> None:
    gathering = Gathering({"p", "d"})
    gathering.join(P.ref, Role.PREFILL, [])
    assert not gathering.over
    gathering.join(D.ref, Role.DECODE, [])
    assert gathering.over


def test_a_later_epoch_says_that_the_earlier_one_is_gone() -> None:
    gathering = Gathering({"p", "d"})
    gathering.join(D.ref, Role.DECODE, [leg(P.ref, LegState.RESERVED)])
    assert gathering.take() == []
    gathering.join(InstanceRef("p", 2), Role.PREFILL, [])
    (found,) = gathering.take()
    assert found.verdict is Verdict.QUIESCE
    assert "p@1 has not come back" in found.reason


def test_what_an_instance_said_counts_no_more_once_it_is_lost() -> None:
    gathering = Gathering({"p", "d", "else"})
    gathering.join(P.ref, Role.PREFILL, [leg(D.ref, LegState.FILLING)])
    gathering.lose(P.ref)
    assert len(gathering) == 0
    gathering.join(D.ref, Role.DECODE, [leg(P.ref, LegState.RESERVED)])
    assert gathering.take() == []
    gathering.end()
    (found,) = gathering.take()
    assert found.verdict is Verdict.QUIESCE


@pytest.mark.parametrize(
    ("state", "verdict"), [(LegState.RESERVED, Verdict.TAKEN_BACK), (LegState.FILLING, Verdict.QUIESCE)]
)
def test_pages_that_the_two_do_not_agree_on_are_not_written(state: LegState, verdict: Verdict) -> None:
    gathering = Gathering({"p", "d"})
    gathering.join(P.ref, Role.PREFILL, [leg(D.ref, state, pages=(1, 2, 3))])
    gathering.join(D.ref, Role.DECODE, [leg(P.ref, LegState.RESERVED)])
    assert [found.verdict for found in gathering.take()] == [verdict]


@pytest.mark.parametrize("state", [LegState.RESERVED, LegState.ENDING])
def test_a_writers_doubt_outlives_the_broker(state: LegState) -> None:
    gathering = Gathering({"p", "d"})
    nobody = TicketLeg("old-1", RequestRef("", 0), InstanceRef("", 0), 0, 0, LegState.ENDING, (), frozenset({1}))
    gathering.join(P.ref, Role.PREFILL, [nobody])
    gathering.join(D.ref, Role.DECODE, [leg(P.ref, state)])
    (found,) = gathering.take()
    assert (found.verdict, found.doubtful_writers) == (Verdict.QUIESCE, frozenset({1}))
    book = TicketBook("new")
    assert {(a.instance.name, a.quiesced) for a in rebuild(book, found, P, D, 2) if isinstance(a, Close)} == {
        ("p", False),
        ("d", False),
    }
    ticket = book.get("old-1")
    assert book.fail(ticket, "the head's word", quiescent=True) == []
    assert ticket.state is TicketState.QUIESCING


def test_nobody_misses_a_ticket_that_only_a_doubt_remembers() -> None:
    gathering = Gathering({"p", "d"})
    nobody = TicketLeg("old-1", RequestRef("", 0), InstanceRef("", 0), 0, 0, LegState.ENDING, (), frozenset({1}))
    gathering.join(P.ref, Role.PREFILL, [nobody])
    gathering.join(D.ref, Role.DECODE, [])
    assert (gathering.take(), len(gathering)) == ([], 0)


def test_without_its_prefill_instance_a_ticket_waits_for_every_writer() -> None:
    found = Found(leg(P.ref, LegState.RESERVED), P.ref, D.ref, Verdict.QUIESCE, reason="gone")
    book = TicketBook("new")
    rebuild(book, found, None, D, 4)
    assert book.get("old-1").writers_open == (0, 1, 2, 3)


@pytest.mark.parametrize("state", LegState)
def test_legs_survive_the_wire(state: LegState) -> None:
    one = leg(P.ref, state, doubtful=(0, 2))
    assert leg_from_pb(leg_to_pb(one)) == one


@pytest.mark.parametrize(("role", "state"), [(Role.PREFILL, LegState.COMMITTED), (Role.DECODE, LegState.FILLING)])
def test_a_leg_that_its_instance_cannot_have_is_refused(role: Role, state: LegState) -> None:
    with pytest.raises(ProtocolViolation, match=f"{state.value} is no state of a {role.value} leg"):
        check_leg(role, leg(P.ref, state))
