"""The proof that nothing is in flight any more for tickets whose writers have died.

all stage processes of the writers' epoch are reaped --> the decode instance reads its sockets to the end --> proven
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.ticket import Action, Ticket
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import PeerLost, StagemeshError
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.backoff import retry


class Proofs:
    """`read_out` asks a decode head, `carry_out` tells heads; `spawn` puts a task under the broker's supervisor."""

    def __init__(
        self,
        book: TicketBook,
        fences: Fences,
        *,
        read_out: Callable[[InstanceRef], Awaitable[None]],
        carry_out: Callable[[list[Action]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        log: Log,
    ) -> None:
        self._book, self._fences, self._read_out = book, fences, read_out
        self._carry_out, self._spawn, self._log = carry_out, spawn, log
        self._under_way: set[str] = set()  # tickets
        self.num_proven = 0

    def look(self) -> None:
        """To be called when an instance is lost, and when processes have been reaped."""
        by_decode: defaultdict[InstanceRef, list[Ticket]] = defaultdict(list)
        for ticket in self._book.unproven():
            reaped = self._fences.are_reaped(ticket.prefill, ticket.num_writers)
            if reaped and ticket.ticket_id not in self._under_way:
                by_decode[ticket.decode].append(ticket)
        for decode, tickets in by_decode.items():
            self._under_way.update(ticket.ticket_id for ticket in tickets)
            self._spawn(self._prove(decode, tickets))

    async def _prove(self, decode: InstanceRef, tickets: list[Ticket]) -> None:
        try:
            await retry(lambda: self._read_out(decode))
        except PeerLost:
            return  # the pages are gone with it
        except StagemeshError as error:
            self._log.warning("a head does not read out", instance_name=decode.name, error=str(error))
            return
        finally:
            self._under_way.difference_update(ticket.ticket_id for ticket in tickets)
        self.num_proven += len(tickets)
        self._log.info("tickets are proven over", instance_name=decode.name, tickets=len(tickets))
        for ticket in tickets:
            self._carry_out(self._book.prove(ticket))
