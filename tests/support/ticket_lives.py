"""A KV transfer as it really goes on both sides, beside the ticket that the broker keeps of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from stagemesh.services.broker.ticket import Close, Ticket, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.identity import RequestRef
from tests.support.instances import DECODE, PREFILL, instance_of
from tests.support.spans import spans_of

PROMPT_TOKENS, NUM_PAGES = 10, 3
_attempts = itertools.count()


def open_ticket(book: TicketBook, writers: list[int] | None = None, sinks: list[int] | None = None) -> Ticket:
    """`writers` and `sinks` are the layers of each stage."""
    prefill = instance_of("p", PREFILL, sizes=writers or [2, 2])
    decode = instance_of("d", DECODE, sizes=sinks or [1, 3])
    return book.open(RequestRef("r", next(_attempts)), prefill, decode, PROMPT_TOKENS, 8)


def all_of(ticket: Ticket, writer: int) -> WriterOutcome:
    """The report of a writer that has written everything."""
    spans = [(leg.target, 0, ticket.num_pages) for leg in ticket.legs if leg.writer == writer]
    return WriterOutcome(spans_of(spans))


@dataclass(slots=True, eq=False)
class Writer:
    """A prefill stage's part in one ticket, as it is."""

    left: list[tuple[int, int]]  # target and page of the prompt
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    landed: list[tuple[int, int]] = field(default_factory=list)
    cancelled: bool = False
    error: str = ""
    in_doubt: bool = False
    reported: bool = False

    @property
    def may_write(self) -> bool:
        return bool(self.in_flight) or self.in_doubt or not (self.reported or self.cancelled)

    def outcome(self) -> WriterOutcome:
        error = self.error or ("cancelled" if self.left else "")
        return WriterOutcome(spans_of((t, p, p + 1) for t, p in self.landed), error, self.in_doubt)


@dataclass(slots=True, eq=False)
class Life:
    """A ticket and what both sides really do about it."""

    ticket: Ticket
    writers: list[Writer]
    announced: bool = False
    begun: bool = False  # the prefill head has its answer, and its stages write
    never: bool = False  # it has given the prompt up before that
    prefill_told: list[Close] = field(default_factory=list)  # on the way
    committed: bool = False
    told_free: bool = False

    @property
    def may_be_written(self) -> bool:
        if not self.begun:
            return self.announced and not self.never
        return any(writer.may_write for writer in self.writers)

    def give_up(self) -> bool:
        """What the prefill head does, and what it says: true if none of its stages is at work on it."""
        if not self.begun:
            self.never = True
        for writer in self.writers:
            writer.cancelled = True
        return not self.begun or all(writer.reported for writer in self.writers)


def life_of(ticket: Ticket) -> Life:
    writers = [Writer([]) for _ in range(ticket.num_writers)]
    for leg in ticket.legs:
        writers[leg.writer].left += [(leg.target, page) for page in range(ticket.num_pages)]
    return Life(ticket, writers)
