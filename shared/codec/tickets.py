"""The legs of tickets on the wire."""

from __future__ import annotations

from stagemesh.shared.codec.arrays import to_bytes, to_tuple
from stagemesh.shared.codec.mesh import ref_from_pb, ref_to_pb
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import broker_pb2

_STATES = {
    LegState.WAITING: broker_pb2.TICKET_LEG_WAITING,
    LegState.RESERVED: broker_pb2.TICKET_LEG_RESERVED,
    LegState.FILLING: broker_pb2.TICKET_LEG_FILLING,
    LegState.COMMITTED: broker_pb2.TICKET_LEG_COMMITTED,
    LegState.ENDING: broker_pb2.TICKET_LEG_ENDING,
}
_STATES_BACK = {wire: state for state, wire in _STATES.items()}


def leg_to_pb(leg: TicketLeg) -> broker_pb2.TicketReport:
    return broker_pb2.TicketReport(
        ticket_id=leg.ticket_id,
        request_id=leg.request.request_id,
        attempt=leg.request.attempt,
        peer=ref_to_pb(leg.peer),
        prompt_tokens=leg.prompt_tokens,
        max_tokens=leg.max_tokens,
        leg=_STATES[leg.state],
        pages=to_bytes(leg.pages),
        doubtful_writers=sorted(leg.doubtful_writers),
    )


def leg_from_pb(message: broker_pb2.TicketReport) -> TicketLeg:
    """Raises ProtocolViolation for a state that this version does not know."""
    state = _STATES_BACK.get(message.leg)
    if state is None:
        raise ProtocolViolation(f"ticket {message.ticket_id}: unknown state of a leg {message.leg}")
    return TicketLeg(
        ticket_id=message.ticket_id,
        request=RequestRef(message.request_id, message.attempt),
        peer=ref_from_pb(message.peer),
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        state=state,
        pages=to_tuple(message.pages),
        doubtful_writers=frozenset(message.doubtful_writers),
    )
