"""What tickets wait for, in words: for an operator before a mesh that stands still."""

from __future__ import annotations

from collections.abc import Container

from stagemesh.services.broker.reported import Reported
from stagemesh.services.broker.ticket import Ticket
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.fsm.ticket import TicketState
from stagemesh.shared.obs.entry import Detail, Entry

Wait = tuple[str, tuple[str, ...]]
"""What for, and on whom: processes or instances."""


def describe_ticket(ticket: Ticket, reserving: Container[str], now_s: float) -> Entry:
    """`reserving` are the tickets whose pages are being asked for. `now_s` is CLOCK_MONOTONIC."""
    waits_for, on = _wait(ticket, reserving)
    details: dict[str, Detail] = {
        "request": str(ticket.request),
        "prefill": str(ticket.prefill),
        "decode": str(ticket.decode),
        "in_state_s": round(now_s - ticket.since_s, 3),
    }
    if ticket.reason:
        details["reason"] = ticket.reason
    return Entry("ticket", ticket.ticket_id, now_s - ticket.opened_s, ticket.state.value, waits_for, on, details)


def failure_details(ticket: Ticket) -> dict[str, Detail]:
    """What listeners are told of one that has failed."""
    return {
        "ticket_id": ticket.ticket_id,
        "request": str(ticket.request),
        "prefill": str(ticket.prefill),
        "decode": str(ticket.decode),
        "reason": ticket.reason,
    }


def _wait(ticket: Ticket, reserving: Container[str]) -> Wait:
    prefill, decode = ticket.prefill.name, ticket.decode.name
    ranks = ", ".join(map(str, ticket.writers_open))
    writers = tuple(f"{prefill}/{rank}" for rank in ticket.writers_open)
    match ticket.state:
        case TicketState.OPENED if ticket.ticket_id in reserving:
            return "pages there", (decode,)
        case TicketState.OPENED:
            return "the prefill side to ask for pages", (prefill,)
        case TicketState.RESERVED:
            return "the announcement of the first write", (prefill,)
        case TicketState.FILLING:
            return f"the reports of writers {ranks}", writers
        case TicketState.QUIESCING:
            return f"proof that writers {ranks} have nothing in flight", writers
        case TicketState.COMMITTED:
            return "the decode side to take it over", (decode,)
        case TicketState.CLOSED:
            return "", ()


def describe_instance(info: InstanceInfo, times: Reported, now_s: float) -> Entry:
    details = {"role": info.role.value, "epoch": info.ref.epoch, "last_report_s": round(now_s - times.last_s, 3)}
    state = times.state.value
    return Entry("instance", info.ref.name, now_s - times.joined_s, state, details=details)
