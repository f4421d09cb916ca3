"""Requests on their way to a first token: some sent off, the others in line until those have theirs.

waits --its turn, and there is room--> sent off --first token, or its end--> done

Heads know no clients. So only as many are sent off as keep them busy, and what comes then is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stagemesh.services.router.fair import FairLine, over_their_share

MOST_NEW_TOKENS: Final = 256
"""Of a request's new tokens so many count in its cost: many ask for all that there may be, and make few."""


class Departures:
    """`room` is how many may be without a first token at once, now."""

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self.line = FairLine()
        self._begin: dict[str, Callable[[], None]] = {}
        self._sent: set[str] = set()

    def wait(
        self,
        request_id: str,
        client: str,
        begin: Callable[[], None],
        *,
        weight: float,
        order: float,
        prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        """`begin` is called when it is to be sent off, maybe at once."""
        self._begin[request_id] = begin
        cost = prompt_tokens + min(max_tokens, MOST_NEW_TOKENS)
        self.line.add(request_id, client, weight=weight, order=order, cost=cost)
        self._send()

    def done(self, request_id: str) -> None:
        """It has its first token, or is over. A no-op for others."""
        self.line.discard(request_id)
        self._begin.pop(request_id, None)
        self._sent.discard(request_id)
        self._send()

    def crowded_out(self, waiting: Mapping[str, int], weights: Mapping[str, float], client: str) -> str | None:
        """The request that makes room for one of `client`, where all places are taken: the last one of a client that
        has more than its share of them. None if there is none that has not been sent off."""
        last = (self.line.last_of(name) for name in over_their_share(waiting, weights, client))
        return next((request_id for request_id in last if request_id is not None), None)

    def _send(self) -> None:
        while len(self._sent) < self._room() and (request_id := self.line.take()) is not None:
            self._sent.add(request_id)
            self._begin.pop(request_id)()

    def check_integrity(self) -> None:
        self.line.check_integrity()
