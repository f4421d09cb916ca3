"""Both legs of a KV transfer as heads keep them, and a broker between them that may be gone at any moment.

Heads answer for themselves only; what the broker tells them waits in `letters` until it is delivered, or lost with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from stagemesh.services.broker.gathering import Gathering
from stagemesh.services.broker.rebuild import rebuild
from stagemesh.services.broker.ticket import Action, Commit, Ticket, Verify, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.directory import Role
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.errors import Cancelled
from stagemesh.shared.fsm.ticket import TicketState
from tests.support.instances import DECODE, PREFILL, instance_of
from tests.support.spans import spans_of

P, D = instance_of("p", PREFILL), instance_of("d", DECODE, sizes=(1, 3))
PROMPT_TOKENS, NUM_PAGES = 10, 3
OPEN = (LegState.WAITING, LegState.RESERVED, LegState.FILLING)


@dataclass(slots=True, eq=False)
class Rank:
    """A prefill stage: pieces that it has not begun, that are in flight, that have landed; who has heard its report."""

    left: list[tuple[int, int]]
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    landed: list[tuple[int, int]] = field(default_factory=list)
    in_doubt: bool = False
    error: str = ""
    heard_by: int | None = None  # which start of the broker has answered

    def outcome(self) -> WriterOutcome:
        error = self.error or ("cancelled" if self.left else "")
        return WriterOutcome(spans_of((t, p, p + 1) for t, p in self.landed), error, self.in_doubt)


@dataclass(slots=True, eq=False)
class Both:
    """`prefill` and `decode` are None once that side has let go of it."""

    ticket_id: str
    request: RequestRef
    ranks: list[Rank]
    prefill: LegState | None = LegState.WAITING
    prefill_pages: tuple[int, ...] = ()
    decode: LegState | None = LegState.WAITING
    decode_pages: tuple[int, ...] = ()
    prefill_fails: bool = False  # it has given up, and the broker has not answered that yet
    decode_fails: bool = False

    @property
    def may_be_written(self) -> bool:
        if any(rank.in_doubt or rank.in_flight for rank in self.ranks):
            return True
        return self.prefill is LegState.FILLING and any(rank.left for rank in self.ranks)

    @property
    def unsettled(self) -> bool:
        return self.prefill in (LegState.FILLING, LegState.ENDING) and any(r.heard_by is None for r in self.ranks)


class Mesh:
    """One prefill and one decode instance, and their tickets."""

    def __init__(self) -> None:
        self.start, self.book = 1, TicketBook("1")
        self.all: list[Both] = []
        self.letters: list[tuple[Action, Rank | None]] = []
        self._pages = itertools.count()

    def open(self) -> Both:
        ticket = self.book.open(RequestRef("r", len(self.all)), P, D, PROMPT_TOKENS, 8)
        ranks = [
            Rank([(leg.target, page) for leg in ticket.legs if leg.writer == rank for page in range(NUM_PAGES)])
            for rank in range(ticket.num_writers)
        ]
        self.all.append(Both(ticket.ticket_id, ticket.request, ranks))
        return self.all[-1]

    def ticket(self, both: Both) -> Ticket | None:
        try:
            return self.book.get(both.ticket_id)
        except Cancelled:
            return None

    # -- calls of heads; `lost`: the answer does not arrive --

    def reserve(self, both: Both, *, lost: bool) -> None:
        ticket = self.ticket(both)
        if ticket is None:
            self.prefill_lets_go(both)
            return
        if both.decode is LegState.WAITING:
            both.decode, both.decode_pages = LegState.RESERVED, tuple(next(self._pages) for _ in range(NUM_PAGES))
        if both.decode is not LegState.RESERVED or ticket.state not in (TicketState.OPENED, TicketState.RESERVED):
            return
        self.book.reserved(ticket)
        if not lost:
            both.prefill, both.prefill_pages = LegState.RESERVED, both.decode_pages

    def fill(self, both: Both, *, lost: bool) -> None:
        ticket = self.ticket(both)
        if ticket is None or ticket.state is TicketState.QUIESCING:
            self.prefill_lets_go(both)
        else:
            granted = self.book.fill(ticket)
            if not lost:
                both.prefill = LegState.FILLING if granted else LegState.WAITING

    def unreserve(self, both: Both, *, lost: bool) -> None:
        ticket = self.ticket(both)
        if ticket is not None and self.book.unreserve(ticket) and not lost:
            assert not both.may_be_written
            both.decode = LegState.WAITING

    def report(self, both: Both, at: int, *, lost: bool) -> None:
        rank, ticket = both.ranks[at], self.ticket(both)
        if ticket is None:
            self.heard(both, rank)
            return
        actions = self.book.report(ticket, at, rank.outcome())
        commits = any(isinstance(action, Commit) for action in actions)
        self.post(actions, rank if commits and not lost else None)
        if not (lost or commits or ticket.state is TicketState.COMMITTED):
            self.heard(both, rank)

    def heard(self, both: Both, rank: Rank) -> None:
        rank.heard_by = self.start
        if not both.unsettled and both.prefill in (LegState.FILLING, LegState.ENDING):
            both.prefill = None

    def prefill_lets_go(self, both: Both) -> None:
        """It writes nothing more; what is in flight ends by itself."""
        if both.prefill in (LegState.WAITING, LegState.RESERVED):
            both.prefill = None
        elif both.prefill is LegState.FILLING:
            both.prefill = LegState.ENDING

    def decode_lets_go(self, both: Both) -> None:
        if both.decode is LegState.WAITING:
            both.decode = None
        elif both.decode is LegState.RESERVED:
            both.decode = LegState.ENDING

    def tell_failures(self, both: Both) -> None:
        """Heads say it until somebody answers."""
        ticket = self.ticket(both)
        if ticket is not None and (both.prefill_fails or both.decode_fails):
            quiescent = both.prefill_fails and both.prefill is None
            self.post(self.book.fail(ticket, "aborted", quiescent=quiescent))
        both.prefill_fails = both.decode_fails = False

    # -- what the broker tells --

    def post(self, actions: list[Action], waiting: Rank | None = None) -> None:
        self.letters += [(action, waiting if isinstance(action, Commit) else None) for action in actions]

    def deliver(self, at: int) -> None:
        action, waiting = self.letters.pop(at % len(self.letters))
        both = next(both for both in self.all if both.ticket_id == action.ticket.ticket_id)
        assert not isinstance(action, Verify), "nobody sums anything here"
        if isinstance(action, Commit):
            self._commit(both, action.ticket, waiting)
        elif action.instance == P.ref:
            self.prefill_lets_go(both)
            quiescent = both.prefill is None and not any(rank.in_doubt for rank in both.ranks)
            if quiescent and action.ticket.state is TicketState.QUIESCING:
                self.post(self.book.fail(action.ticket, action.ticket.reason, quiescent=True))
        else:
            self.decode_lets_go(both)
            if action.quiesced and both.decode is LegState.ENDING:
                assert not both.may_be_written, "told free while somebody may write"
                both.decode = None

    def _commit(self, both: Both, ticket: Ticket, waiting: Rank | None) -> None:
        assert not both.may_be_written
        assert all(not rank.left for rank in both.ranks)
        both.decode = LegState.COMMITTED if both.decode is LegState.RESERVED else None
        self.book.release(ticket)
        if waiting is not None:
            self.heard(both, waiting)

    # -- the broker dies --

    def crash(self, *, prefill_first: bool) -> None:
        """All that it knew and all that it was about to say is gone; the next one asks the heads."""
        self.start += 1
        self.book, self.letters = TicketBook(str(self.start)), []
        gathering = Gathering({"p", "d"})
        sides = [(P, Role.PREFILL, self._prefill_legs()), (D, Role.DECODE, self._decode_legs())]
        for info, role, legs in sides if prefill_first else reversed(sides):
            gathering.join(info.ref, role, legs)
        for found in gathering.take():
            self.post(rebuild(self.book, found, P, D, 2))
        assert len(gathering) == 0
        for both in self.all:  # what another broker has heard of a ticket that is not over is said again
            for at, rank in enumerate(both.ranks):
                if both.unsettled and rank.heard_by is not None:
                    self.report(both, at, lost=False)

    def _prefill_legs(self) -> list[TicketLeg]:
        legs = []
        for both in self.all:
            doubtful = frozenset(at for at, rank in enumerate(both.ranks) if rank.in_doubt and rank.heard_by)
            if both.prefill is not None:
                legs.append(_leg(both, D.ref, both.prefill, both.prefill_pages, doubtful))
            elif doubtful:
                legs.append(_leg(both, D.ref, LegState.ENDING, (), doubtful))
        return legs

    def _decode_legs(self) -> list[TicketLeg]:
        return [_leg(b, P.ref, b.decode, b.decode_pages) for b in self.all if b.decode is not None]


def _leg(
    both: Both,
    peer: InstanceRef,
    state: LegState,
    pages: tuple[int, ...] = (),
    doubtful: frozenset[int] = frozenset(),
) -> TicketLeg:
    pages = () if state is LegState.WAITING else pages
    return TicketLeg(both.ticket_id, both.request, peer, PROMPT_TOKENS, 8, state, pages, doubtful)
