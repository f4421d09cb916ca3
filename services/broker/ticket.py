"""One ticket: what is known of a transfer of KV, and what may be to be done about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.layers import LayerRange, Leg
from stagemesh.shared.fsm.ticket import TICKET, TicketEvent, TicketState


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Pages [first, last) of the prompt, at decode stage `target`; `crcs` of each, if the writer sums what it sends."""

    target: int
    first: int
    last: int
    crcs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriterOutcome:
    """What a writer has reported. `in_doubt`: bytes may still arrive."""

    spans: tuple[PieceSpan, ...]
    error: str = ""
    in_doubt: bool = False


ABORTED = "aborted"
"""The reason of a ticket whose request its client has ended: no failure."""


@dataclass(frozen=True, slots=True)
class Check:
    """What the pages of `span` are to be like, in `layers`, at its target."""

    span: PieceSpan
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the decode head whether what has arrived is what was sent; `verified` takes its answer."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell the decode head that all KV is there."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Close:
    """Tell `instance` that the ticket has failed; with `quiesced`, that nothing will write to its pages any more."""

    ticket: Ticket
    instance: InstanceRef
    quiesced: bool


Action = Commit | Close | Verify


@dataclass(slots=True, eq=False)
class Ticket:
    ticket_id: str
    request: RequestRef
    prefill: InstanceRef
    decode: InstanceRef
    prompt_tokens: int
    max_tokens: int
    num_pages: int
    legs: tuple[Leg, ...]
    num_writers: int
    router: str = ""
    state: TicketState = TICKET.initial
    opened_s: float = field(default_factory=time.monotonic)  # for people, as is `since_s`
    since_s: float = field(default_factory=time.monotonic)  # in this state
    taken_back: bool = False  # pages that it had
    failure_said: bool = False
    reason: str = ""
    lost: bool = True  # once it has failed: not by a fault that the request would meet again
    outcomes: dict[int, WriterOutcome] = field(default_factory=dict)
    verifying: bool = False

    def move(self, event: TicketEvent) -> None:
        self.state = TICKET.advance(f"ticket {self.ticket_id}", self.state, event)
        self.since_s = time.monotonic()

    @property
    def writers_open(self) -> tuple[int, ...]:
        """Writers that have not said that they have nothing in flight."""
        said = {rank for rank, outcome in self.outcomes.items() if not outcome.in_doubt}
        return tuple(rank for rank in range(self.num_writers) if rank not in said)

    @property
    def settled(self) -> bool:
        """Every writer has said that it has nothing in flight."""
        return not self.writers_open

    @property
    def in_doubt(self) -> bool:
        """A writer does not know whether bytes of it may still arrive."""
        return any(outcome.in_doubt for outcome in self.outcomes.values())

    def missing(self) -> str:
        """The first leg with a page that no writer has reported, or an empty string."""
        for leg in self.legs:
            spans = self.outcomes[leg.writer].spans
            written = 0  # pages from the first on
            for first, last in sorted((span.first, span.last) for span in spans if span.target == leg.target):
                written = max(written, last) if first <= written else written
            if written != self.num_pages:
                return f"stage {leg.writer} has not written all pages to stage {leg.target}"
        return ""

    @property
    def checks(self) -> tuple[Check, ...]:
        """What the writers say that they have sent."""
        return tuple(
            Check(span, leg.layers)
            for leg in self.legs
            for span in self.outcomes[leg.writer].spans
            if span.target == leg.target and span.crcs
        )
