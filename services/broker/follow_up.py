"""What the ticket book wants done: heads are told, until they know or are gone."""

from __future__ import annotations

import asyncio

from stagemesh.services.broker.describe import failure_details
from stagemesh.services.broker.members import Members
from stagemesh.services.broker.ticket import ABORTED, Action, Close, Commit, Ticket, Verify
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.errors import PeerLost, StagemeshError
from stagemesh.shared.fsm.ticket import TicketState
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.runtime.tasks import Tasks


class FollowUp:
    """Carries out actions, each in a task of its own."""

    def __init__(self, tickets: TicketBook, members: Members, events: Events, tasks: Tasks, log: Log) -> None:
        self._tickets, self._members, self._events = tickets, members, events
        self._tasks, self._log = tasks, log
        self._committing: dict[str, asyncio.Event] = {}

    async def committed(self, ticket_id: str) -> None:
        """Returns when the decode head knows that it has the ticket's KV, at once if nobody is telling it."""
        if (committed := self._committing.get(ticket_id)) is not None:
            await committed.wait()

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Commit():
                    self._committing.setdefault(action.ticket.ticket_id, asyncio.Event())
                    self._tasks.spawn(self._commit(action))
                case Verify():
                    self._committing[action.ticket.ticket_id] = asyncio.Event()
                    self._tasks.spawn(self._verify(action))
                case Close():
                    self._say_failure(action.ticket)
                    self._tasks.spawn(self._close(action))

    async def _verify(self, action: Verify) -> None:
        error = "its decode instance is lost"
        try:
            error = await retry(lambda: self._members.heads.verify(action))
        except PeerLost:
            pass  # its tickets have failed with it
        except StagemeshError as failure:
            error = f"its KV cannot be verified: {failure}"
        actions = self._tickets.verified(action.ticket, error)
        if not any(isinstance(follows, Commit) for follows in actions):
            self._committing.pop(action.ticket.ticket_id).set()
        self.carry_out(actions)

    def _say_failure(self, ticket: Ticket) -> None:
        """Once, and not if it is only no longer wanted."""
        if ticket.failure_said or ticket.reason == ABORTED:
            return
        ticket.failure_said = True
        self._events.say(EventKind.TICKET_FAILED, ticket.decode.name, **failure_details(ticket))

    async def _commit(self, action: Commit) -> None:
        ticket = action.ticket
        try:
            await retry(lambda: self._members.heads.commit(action))
            self._tickets.release(ticket)
        except PeerLost:
            pass  # its tickets have failed with it
        except StagemeshError as error:
            self._log.warning("a head refused a commit", ticket_id=ticket.ticket_id, error=str(error))
            self.carry_out(self._tickets.refused(ticket, f"its commit was refused: {error}"))
        finally:
            self._committing.pop(ticket.ticket_id).set()

    async def _close(self, action: Close) -> None:
        ticket = action.ticket
        try:
            quiescent = await retry(lambda: self._members.heads.close_ticket(action))
        except PeerLost:
            return
        except StagemeshError as error:
            self._log.warning("a head refused to close a ticket", ticket_id=ticket.ticket_id, error=str(error))
            return
        if quiescent and ticket.state is TicketState.QUIESCING and action.instance == ticket.prefill:
            self.carry_out(self._tickets.fail(ticket, ticket.reason, quiescent=True))
