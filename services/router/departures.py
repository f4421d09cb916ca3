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

    def done(self, *request_ids: str) -> None:
        """They have their first token, or are over. A no-op for others."""
        for request_id in request_ids:
            self.line.discard(request_id)
            self._begin.pop(request_id, None)
            self._sent.discard(request_id)
        self._send()

    def crowded_out(
        self, waiting: Mapping[str, int], weights: Mapping[str, float], client: str, count: int = 1, free: int = 0
    ) -> list[str] | None:
        """The requests that make room for `count` of `client`, where `free` places are: for each the last one of a
        client that still has more than its share of them. None if there is no room for all: those that have been sent
        off keep their places."""
        left, victims = dict(waiting), list[str]()
        lines = {name: self.line.from_last(name) for name in waiting}
        for more in range(free + 1, count + 1):
            names = over_their_share(left, weights, client, more)
            found = ((name, request_id) for name in names if (request_id := next(lines[name], None)) is not None)
            if (victim := next(found, None)) is None:
                return None
            left[victim[0]] -= 1
            victims.append(victim[1])
        return victims

    def _send(self) -> None:
        while len(self._sent) < self._room() and (request_id := self.line.take()) is not None:
            self._sent.add(request_id)
            self._begin.pop(request_id)()

    def check_integrity(self) -> None:
        self.line.check_integrity()
