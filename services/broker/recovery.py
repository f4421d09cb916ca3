"""A broker that has just started: it waits for the heads and rebuilds their tickets; who asks for one waits meanwhile.

gathering --all instances are here, or the bound is over--> over
A head that comes later is heard all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from stagemesh.services.broker.gathering import Found, Gathering, Verdict
from stagemesh.services.broker.rebuild import rebuild
from stagemesh.services.broker.ticket import Action, Close, Ticket
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.errors import Cancelled
from stagemesh.shared.fsm.ticket import TicketState
from stagemesh.shared.obs.log import Log


class Recovery:
    """`pp_sizes` are of the instances that the deployment has, by name. `find` looks an instance up in the directory;
    `carry_out` tells heads; `on_over` is called once nobody is waited for any more."""

    def __init__(
        self,
        book: TicketBook,
        pp_sizes: Mapping[str, int],
        *,
        bound_s: float,
        find: Callable[[InstanceRef], InstanceInfo | None],
        carry_out: Callable[[list[Action]], None],
        on_over: Callable[[], None],
        log: Log,
    ) -> None:
        self._book, self._pp_sizes, self._bound_s = book, pp_sizes, bound_s
        self._find, self._carry_out, self._on_over, self._log = find, carry_out, on_over, log
        self._gathering = Gathering(pp_sizes)
        self._news = asyncio.Event()
        self._decided: set[str] = set()  # of the broker before this one, while gathering
        self._over = asyncio.Event()
        self.found = dict.fromkeys(Verdict, 0)

    @property
    def gathering(self) -> bool:
        return not self._over.is_set()

    @property
    def num_pending(self) -> int:
        return len(self._gathering)

    async def run(self) -> None:
        """A task of the broker, until nobody is waited for any more."""
        try:
            async with asyncio.timeout(self._bound_s):
                await self._over.wait()
        except TimeoutError:
            self._gathering.end()
            self._rebuild()

    def joined(self, info: InstanceInfo, legs: Iterable[TicketLeg]) -> None:
        """A head has joined, and this is what it knows."""
        unknown: list[TicketLeg] = []
        for leg in legs:
            known = self._known(leg.ticket_id)
            if known is None:
                unknown.append(leg)
            elif known.state is TicketState.QUIESCING and known.prefill == info.ref:
                self._carry_out([Close(known, known.prefill, quiesced=False)])  # it may not have heard; its word counts
        self._gathering.join(info.ref, info.role, unknown)
        self._rebuild()

    def lost(self, ref: InstanceRef) -> None:
        self._gathering.lose(ref)
        self._rebuild()

    def _rebuild(self) -> None:
        for found in self._gathering.take():
            self._take(found)
        if self._gathering.over and self.gathering:
            self._over.set()
            self._decided.clear()
            count = {verdict.value: number for verdict, number in self.found.items() if number}
            self._log.info("the broker knows who is there", tickets_found=sum(count.values()), verdicts=str(count))
            self._on_over()
        self._news.set()
        self._news = asyncio.Event()

    def _take(self, found: Found) -> None:
        self.found[found.verdict] += 1
        if self.gathering:
            self._decided.add(found.leg.ticket_id)
        prefill, decode = self._find(found.prefill), self._find(found.decode)
        writers = self._pp_sizes.get(found.prefill.name, 1)
        self._log.info(
            "a ticket was found again",
            ticket_id=found.leg.ticket_id,
            request_id=found.leg.request.request_id,
            attempt=found.leg.request.attempt,
            verdict=found.verdict.value,
        )
        self._carry_out(rebuild(self._book, found, prefill, decode, writers))

    # -- who waits --

    async def ticket(self, ticket_id: str) -> Ticket:
        """Raises Cancelled for a ticket that is closed, or never was. Waits while that cannot be known."""
        while (ticket := self._known(ticket_id)) is None:
            if not self._may_come(ticket_id):
                raise Cancelled(f"ticket {ticket_id} is closed")
            await self._news.wait()
        return ticket

    async def until_here(self, *refs: InstanceRef) -> None:
        """Returns when all of them are in the directory, or nobody is waited for any more."""
        while self.gathering and not all(self._find(ref) for ref in refs):
            await self._news.wait()

    def _known(self, ticket_id: str) -> Ticket | None:
        try:
            return self._book.get(ticket_id)
        except Cancelled:
            return None

    def _may_come(self, ticket_id: str) -> bool:
        return self.gathering and not self._book.is_own(ticket_id) and ticket_id not in self._decided
