"""Which requests a router has, whose they are, who may come in, and who is sent off next.

admitted (waits) --tokenized--> in line --its turn--> sent off --first token--> served --> left
   `--refused: no room                `--refused: it makes room for another client's
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from stagemesh.services.router.departures import Departures
from stagemesh.services.router.record import RequestRecord
from stagemesh.services.router.request import LiveRequest
from stagemesh.services.router.waiting import Waiting
from stagemesh.shared.config import RouterSection
from stagemesh.shared.errors import Bug, Rejected, Retryable
from stagemesh.shared.rpc.guard import Callers


class Entrance:
    """Waiting for `ageing_s` is worth a point of priority, among the requests of one client. `room` is how many may be
    sent off before those before them have their first token, now."""

    def __init__(self, section: RouterSection, callers: Callers, room: Callable[[], int], *, ageing_s: float) -> None:
        self._max_live, self._callers, self._ageing_s = section.max_live_requests, callers, ageing_s
        self.live: dict[str, LiveRequest | None] = {}  # None: not tokenized yet
        self.waiting = Waiting(section.max_waiting_requests, section.max_waiting_s)
        self._owners: dict[str, str] = {}  # the client of each
        self._live_of: Counter[str] = Counter()  # how many of each client
        self._crowded_out: set[str] = set()  # they have just lost their places to others
        self._departures = Departures(room)
        self.refuses = False
        self._empty = asyncio.Event()

    def check_room(self, client: str, now_s: float, count: int = 1) -> list[str]:
        """For `count` of them, before anything is done for any, so that a flood costs little: those that have to make
        room first, which they do where the request is found right. A client that has more than its share of the places
        gives one to a client that has less, if it has such as have not been sent off. Raises Exhausted."""
        if self.refuses:
            raise Retryable("this router is being stopped")
        if len(self.live) >= self._max_live:
            raise self.waiting.exhausted(f"{len(self.live)} requests are live, which is the limit", now_s)
        if len(self.live) + count > self._max_live:
            said = f"{len(self.live)} requests are live, and {self._max_live} may be: there is no room for {count} more"
            raise self.waiting.exhausted(said, now_s)
        most = max(1, self._max_live // 2)  # who does not read its answers takes no more than that from the others
        if self._callers.is_checked and self._live_of[client] + count > most:
            said = f"{self._live_of[client]} requests of this client are live, and {most} may be"
            raise self.waiting.exhausted(said, now_s)
        weights = {name: known.weight for name, known in self._callers.clients.items()}
        free = self.waiting.num_free
        crowded_out = self._departures.crowded_out(self.waiting.by_client, weights, client, count, free)
        if crowded_out is None:
            self.waiting.check_room(now_s, count)
        return crowded_out or []

    def make_room(self, crowded_out: list[str], now_s: float) -> None:
        """They have to, as has just been found: nothing has been awaited since."""
        for request_id in crowded_out:
            live = self.live[request_id]
            assert live is not None, "what is in line has been tokenized"
            live.fail(self.waiting.exhausted("it makes room for another client: its own has the most waiting", now_s))
            self.waiting.leave(request_id)
            self._crowded_out.add(request_id)
        self._departures.done(*crowded_out)

    def admit(self, request_id: str, record: RequestRecord) -> str:
        """It has come in. Raises Rejected, Exhausted."""
        if request_id in self.live:
            raise Rejected("request_id", f"{request_id!r} is in use by a live request")
        self.waiting.enter(request_id, record.arrived_s, record.client)
        self.live[request_id], self._owners[request_id] = None, record.client
        self._live_of[record.client] += 1
        record.admitted(request_id)
        return request_id

    def send_off(self, live: LiveRequest, client: str) -> None:
        """Now, or when it is its turn."""
        wanted, known = live.wanted, self._callers.clients.get(client)
        self._departures.wait(
            wanted.request_id,
            client,
            live.begin,
            weight=1.0 if known is None else known.weight,
            order=wanted.arrived_s - wanted.priority * self._ageing_s,
            prompt_tokens=len(wanted.token_ids),
            max_tokens=wanted.sampling.max_tokens,
        )

    def served(self, request_id: str, now_s: float) -> None:
        """It has its first token."""
        self.waiting.served(request_id, now_s)
        self._departures.done(request_id)

    def leave(self, request_id: str) -> None:
        """It is over."""
        self.waiting.leave(request_id)
        self._departures.done(request_id)
        self._crowded_out.discard(request_id)
        client = self._owners.pop(request_id)
        self._live_of[client] -= 1
        if not self._live_of[client]:
            del self._live_of[client]
        del self.live[request_id]
        if not self.live:
            self._empty.set()

    def of(self, request_id: str, client: str) -> LiveRequest | None:
        """The request, if it is that client's and has been taken."""
        return self.live.get(request_id) if self._owners.get(request_id) == client else None

    def refuse(self) -> None:
        """No new requests from now on."""
        self.refuses = True

    async def empty(self) -> None:
        """Returns when no request is live."""
        while self.live:
            self._empty.clear()
            await self._empty.wait()

    def check_integrity(self) -> None:
        """Raises Bug unless those who wait are the live ones without a token."""
        self.waiting.check_integrity()
        self._departures.check_integrity()
        if self._live_of != Counter(self._owners.values()):
            raise Bug(f"{len(self._owners)} requests are live, {self._live_of.total()} of clients")
        without = {name for name, live in self.live.items() if live is None or live.first_token_s is None}
        without -= self._crowded_out
        wrong = [name for name in self.live if (name in self.waiting) != (name in without)]
        if wrong or len(self.waiting) != len(without):
            raise Bug(f"{len(self.waiting)} requests wait, {len(without)} have no token; not so: {wrong[:3]}")
