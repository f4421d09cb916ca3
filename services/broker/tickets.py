"""The tickets of KV transfers. Pure: events in, calls to heads out.

A ticket commits when every writer has reported every piece. Pieces are identified, by leg and page of the prompt, not
counted. One failure fails it, and both legs are told at once; its pages are free again once every writer has said that
it has nothing in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagemesh.services.broker.ticket import Action, Close, Commit, Ticket, Verify, WriterOutcome
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.layers import plan_legs
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.errors import Cancelled, ProtocolViolation
from stagemesh.shared.fsm.ticket import TicketEvent, TicketState


class TicketBook:
    """All tickets that are not closed."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._opened = prefix, 0
        self._tickets: dict[str, Ticket] = {}
        self._by_request: dict[RequestRef, Ticket] = {}
        self.closed_by_outcome = {"committed": 0, "failed": 0}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def open(
        self,
        request: RequestRef,
        prefill: InstanceInfo,
        decode: InstanceInfo,
        prompt_tokens: int,
        max_tokens: int,
        router: str = "",
    ) -> Ticket:
        """Asked again for the same, it gives the same: its first answer was lost."""
        known = self._by_request.get(request)
        if known is not None and (known.prefill, known.decode, known.router) == (prefill.ref, decode.ref, router):
            return known
        self._opened += 1
        ticket = Ticket(
            ticket_id=f"{self._prefix}-{self._opened}",
            request=request,
            prefill=prefill.ref,
            decode=decode.ref,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            num_pages=pages_for(prompt_tokens, decode.manifest.page_size),
            legs=plan_legs([s.layers for s in prefill.stages], [s.layers for s in decode.stages]),
            num_writers=len(prefill.stages),
            router=router,
        )
        self.adopt(ticket)
        return ticket

    def adopt(self, ticket: Ticket) -> None:
        """It is in this book from now on."""
        self._tickets[ticket.ticket_id] = self._by_request[ticket.request] = ticket

    def is_own(self, ticket_id: str) -> bool:
        """It was opened here, not by a broker before this one."""
        return ticket_id.startswith(f"{self._prefix}-")

    def _remove(self, ticket: Ticket) -> None:
        del self._tickets[ticket.ticket_id]
        if self._by_request.get(ticket.request) is ticket:
            del self._by_request[ticket.request]

    def get(self, ticket_id: str) -> Ticket:
        """Raises Cancelled for a ticket that is closed, or never was."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            raise Cancelled(f"ticket {ticket_id} is closed")
        return ticket

    def reserved(self, ticket: Ticket) -> None:
        """The decode side has set pages aside. Asked again for pages it has, it says so again."""
        if ticket.state is not TicketState.RESERVED:
            ticket.move(TicketEvent.RESERVE)

    def abandon(self, router: str) -> list[Action]:
        """A router is gone. What heads have heard of ends with its sessions; of what is only opened nobody knows."""
        opened = [t for t in self._tickets.values() if t.router == router and t.state is TicketState.OPENED]
        return [action for ticket in opened for action in self.fail(ticket, f"{router} is gone")]

    def unreserve(self, ticket: Ticket) -> bool:
        """The decode side wants its pages back. True unless somebody may write to them: then a fill is refused until
        pages have been asked for again. May come twice: its first answer was lost."""
        if ticket.state is TicketState.RESERVED:
            ticket.move(TicketEvent.UNRESERVE)
            ticket.taken_back = True
        return ticket.state is TicketState.OPENED

    def fill(self, ticket: Ticket) -> bool:
        """Writes are about to begin. False if the pages have been taken back meanwhile."""
        if ticket.state is TicketState.OPENED:
            if ticket.taken_back:
                return False
            raise ProtocolViolation(f"ticket {ticket.ticket_id} has no pages yet: nothing can be written")
        if ticket.state is TicketState.QUIESCING:
            raise Cancelled(f"ticket {ticket.ticket_id} has failed: {ticket.reason}")
        if ticket.state is not TicketState.FILLING:  # the announcement may come twice: its first answer was lost
            ticket.move(TicketEvent.FILL)
        return True

    def report(self, ticket: Ticket, pp_rank: int, outcome: WriterOutcome) -> list[Action]:
        """A writer has nothing in flight any more. May come twice: its first answer was lost. Raises ProtocolViolation
        for a writer that the ticket has not."""
        if not 0 <= pp_rank < ticket.num_writers:
            raise ProtocolViolation(f"ticket {ticket.ticket_id} has no writer {pp_rank}")
        if ticket.state is TicketState.COMMITTED:
            return []
        if ticket.state not in (TicketState.FILLING, TicketState.QUIESCING):
            raise ProtocolViolation(f"ticket {ticket.ticket_id} is {ticket.state.value}: no writer reports now")
        ticket.outcomes[pp_rank] = outcome
        actions: list[Action] = []
        if ticket.state is TicketState.FILLING and outcome.error:
            actions += self.fail(ticket, f"prefill stage {pp_rank}: {outcome.error}")
        elif ticket.state is TicketState.FILLING and ticket.settled:
            if missing := ticket.missing():
                ticket.lost = False
                return self.fail(ticket, missing)
            return self._complete(ticket)
        return actions + self._close_if_settled(ticket)

    def _complete(self, ticket: Ticket) -> list[Action]:
        """Every piece is there, for all that the writers know."""
        if not ticket.checks:
            ticket.move(TicketEvent.COMMIT)
            return [Commit(ticket)]
        again, ticket.verifying = ticket.verifying, True
        return [] if again else [Verify(ticket)]

    def verified(self, ticket: Ticket, error: str) -> list[Action]:
        """The decode head has looked at all pieces. `error`: what is wrong with them; the request may run again."""
        if self._tickets.get(ticket.ticket_id) is not ticket or ticket.state is not TicketState.FILLING:
            return []  # it has failed meanwhile
        if error:
            return self.fail(ticket, error)
        ticket.move(TicketEvent.COMMIT)
        return [Commit(ticket)]

    def fail(self, ticket: Ticket, reason: str, *, quiescent: bool = False) -> list[Action]:
        """Nobody will use it. `quiescent`: the writers have nothing in flight and never will."""
        if ticket.state is TicketState.COMMITTED or self._tickets.get(ticket.ticket_id) is not ticket:
            return []  # or the decode instance was lost meanwhile
        first = ticket.state is not TicketState.QUIESCING
        if first:
            ticket.reason = reason
            ticket.move(TicketEvent.FAIL)
        if quiescent:
            for rank in range(ticket.num_writers):  # a writer's own word stays, its doubt above all
                ticket.outcomes.setdefault(rank, WriterOutcome((), reason))
        if ticket.state is TicketState.CLOSED:
            return [self._close(ticket), Close(ticket, ticket.prefill, quiesced=True)]
        told: list[Action] = [Close(ticket, leg, quiesced=False) for leg in (ticket.prefill, ticket.decode)]
        return (told if first else []) + self._close_if_settled(ticket)

    def release(self, ticket: Ticket) -> None:
        """The decode head has taken the pages over, or given them back."""
        if self._tickets.get(ticket.ticket_id) is not ticket:
            return  # the decode instance was lost meanwhile
        ticket.move(TicketEvent.RELEASE)
        self.closed_by_outcome["committed"] += 1
        self._remove(ticket)

    def refused(self, ticket: Ticket, reason: str) -> list[Action]:
        """The decode head does not take the KV over that is all there. Nothing writes to it any more."""
        if self._tickets.get(ticket.ticket_id) is not ticket:
            return []  # the decode instance was lost meanwhile
        ticket.reason = reason
        ticket.move(TicketEvent.RELEASE)
        return [self._close(ticket)]

    def unproven(self) -> list[Ticket]:
        """Those whose pages wait for the proof that nothing writes to them any more."""
        return [ticket for ticket in self._tickets.values() if ticket.state is TicketState.QUIESCING]

    def prove(self, ticket: Ticket) -> list[Action]:
        """The writers' processes have been reaped, and what they had sent has been read: nothing is in flight."""
        if self._tickets.get(ticket.ticket_id) is not ticket or ticket.state is not TicketState.QUIESCING:
            return []  # proven otherwise, or the decode instance was lost meanwhile
        ticket.outcomes = {rank: WriterOutcome((), ticket.reason) for rank in range(ticket.num_writers)}
        return self._close_if_settled(ticket)

    def lose(self, ref: InstanceRef) -> list[Action]:
        """An instance is gone: its tickets fail. What the other side holds for them waits for proof."""
        actions: list[Action] = []
        for ticket in [t for t in self._tickets.values() if ref in (t.prefill, t.decode)]:
            if ticket.decode == ref:
                actions += self._lose_decode(ticket)
            else:
                actions += self.fail(ticket, f"{ref} is lost")
        return actions

    def _lose_decode(self, ticket: Ticket) -> list[Action]:
        """Its pages are gone with it: nothing is left to be protected."""
        self.closed_by_outcome["failed"] += 1
        self._remove(ticket)
        ticket.reason = ticket.reason or f"{ticket.decode} is lost"
        return [Close(ticket, ticket.prefill, quiesced=True)]

    def _close_if_settled(self, ticket: Ticket) -> list[Action]:
        if ticket.state is not TicketState.QUIESCING or not ticket.settled:
            return []
        ticket.move(TicketEvent.QUIESCED)
        return [self._close(ticket)]

    def _close(self, ticket: Ticket) -> Close:
        self.closed_by_outcome["failed"] += 1
        self._remove(ticket)
        return Close(ticket, ticket.decode, quiesced=True)

    def by_state(self) -> dict[str, int]:
        counts = dict.fromkeys((state.value for state in TicketState), 0)
        for ticket in self._tickets.values():
            counts[ticket.state.value] += 1
        return counts
