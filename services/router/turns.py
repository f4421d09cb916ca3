"""Whose client is served next, so that a router that falls behind reads on and joins tokens.

asked --one of the places is free--> granted --its message is sent, or it takes too long--> done

A message to a client costs several times what a token costs. Only a few messages are on their way at a time; the tokens
that come for those who wait are then sent together. A router that keeps up grants at once, and nobody waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

NUM_PLACES: Final = 48  # a few milliseconds of work
PATIENCE_S: Final = 0.01  # a client that takes its message no sooner does not keep the others waiting


class Turns:
    """First asked, first granted. A grant sets the event that asked."""

    def __init__(self, num_places: int = NUM_PLACES, patience_s: float = PATIENCE_S) -> None:
        self._num_places, self._patience_s = num_places, patience_s
        self._asked: dict[asyncio.Event, None] = {}
        self._granted: dict[asyncio.Event, float] = {}  # since when; in that order
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._asked)

    def ask(self, who: asyncio.Event) -> None:
        """No more than one place for each, however often it asks."""
        if who not in self._granted:
            self._asked[who] = None
            self._grant()

    def done(self, who: asyncio.Event) -> None:
        """It does not need its place, or does not ask for one any more. A no-op for others."""
        self._asked.pop(who, None)
        if self._granted.pop(who, None) is not None:
            self._grant()

    def _grant(self) -> None:
        while self._asked and len(self._granted) < self._num_places:
            who = next(iter(self._asked))
            del self._asked[who]
            self._granted[who] = time.monotonic()
            who.set()
        if self._asked and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)

    def _lose_patience(self) -> None:
        self._timer = None
        before_s = time.monotonic() - self._patience_s
        for who in [who for who, since_s in self._granted.items() if since_s <= before_s]:
            del self._granted[who]
        self._grant()
