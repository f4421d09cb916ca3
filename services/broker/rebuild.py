"""A ticket of the broker before this one, as it is found again. Pure."""

from __future__ import annotations

from stagemesh.services.broker.gathering import Found, Verdict
from stagemesh.services.broker.ticket import Action, Close, Ticket, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.layers import Leg, plan_legs
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.fsm.ticket import TicketEvent

_WAY = {
    Verdict.OPEN: (),
    Verdict.TAKEN_BACK: (),
    Verdict.RESERVED: (TicketEvent.RESERVE,),
    Verdict.FILLING: (TicketEvent.RESERVE, TicketEvent.FILL),
    Verdict.QUIESCE: (TicketEvent.RESERVE, TicketEvent.FILL),
}
DOUBT = "it ended without proof that nothing is in flight"


def rebuild(
    book: TicketBook, found: Found, prefill: InstanceInfo | None, decode: InstanceInfo | None, num_writers: int
) -> list[Action]:
    """Takes it into the book, unless it is over; what the heads have to be told. `num_writers` is the size of a prefill
    instance that is not there any more. What the writers have reported comes again from the prefill head."""
    if found.verdict is Verdict.DONE:
        return []
    ticket = _ticket(found, prefill, decode, num_writers)
    if found.verdict is Verdict.FAIL:
        ticket.reason = found.reason
        ticket.move(TicketEvent.FAIL)
        book.closed_by_outcome["failed"] += 1
        return [Close(ticket, leg, quiesced=True) for leg in (found.prefill, found.decode)]
    for event in _WAY[found.verdict]:
        ticket.move(event)
    book.adopt(ticket)
    if found.verdict is not Verdict.QUIESCE:
        return []
    for rank in found.doubtful_writers:
        ticket.outcomes[rank] = WriterOutcome((), DOUBT, in_doubt=True)
    return book.fail(ticket, found.reason)


def _ticket(found: Found, prefill: InstanceInfo | None, decode: InstanceInfo | None, num_writers: int) -> Ticket:
    leg, known = found.leg, decode or prefill
    legs: tuple[Leg, ...] = ()
    if prefill is not None and decode is not None:
        legs = plan_legs([s.layers for s in prefill.stages], [s.layers for s in decode.stages])
    return Ticket(
        ticket_id=leg.ticket_id,
        request=leg.request,
        prefill=found.prefill,
        decode=found.decode,
        prompt_tokens=leg.prompt_tokens,
        max_tokens=leg.max_tokens,
        num_pages=len(leg.pages) if known is None else pages_for(leg.prompt_tokens, known.manifest.page_size),
        legs=legs,
        num_writers=num_writers if prefill is None else len(prefill.stages),
        taken_back=found.verdict is Verdict.TAKEN_BACK,
    )
