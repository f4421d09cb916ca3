"""Who waits for a first token: how many may, for how long, and what those hear who may not. Pure.

entered --first token--> served          refused: there is no room
   |`--too long--> refused
   `--gone

A request that has had its first token is nothing to this: it is never ended for want of room or time.
Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final

from stagemesh.shared.errors import Bug, Exhausted

PACE_OVER: Final = 64  # first tokens that the pace is taken from
MOST_RETRY_AFTER_S: Final = 60.0  # a guess from the pace of moments is worth no more


class Waiting:
    """The requests of one router before their first token, oldest first."""

    def __init__(self, max_requests: int, max_s: float) -> None:
        self._max_requests, self._max_s = max_requests, max_s
        self._since_s: dict[str, float] = {}
        self._clients: dict[str, str] = {}  # of those
        self.by_client: Counter[str] = Counter()  # how many of each; nobody has none
        self._served_s: deque[float] = deque(maxlen=PACE_OVER)  # while somebody has waited without a break

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._since_s

    @property
    def num_free(self) -> int:
        """How many more may wait."""
        return self._max_requests - len(self._since_s)

    def check_room(self, now_s: float, count: int = 1) -> None:
        """Raises Exhausted, with a hint, if `count` more were more than may wait."""
        if count > self.num_free:
            raise self.exhausted(f"no more than {self._max_requests} requests may wait", now_s)

    def enter(self, request_id: str, now_s: float, client: str = "") -> None:
        """It has arrived at `now_s`. Raises Exhausted if there is no room."""
        self.check_room(now_s)
        self._since_s[request_id] = now_s
        self._clients[request_id] = client
        self.by_client[client] += 1

    def served(self, request_id: str, now_s: float) -> None:
        """It has its first token."""
        if request_id in self._since_s:
            self._served_s.append(now_s)
            self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """It waits no more. A no-op for those that do not."""
        if self._since_s.pop(request_id, None) is not None:
            client = self._clients.pop(request_id)
            self.by_client[client] -= 1
            if not self.by_client[client]:
                del self.by_client[client]
        if not self._since_s:
            self._served_s.clear()

    def left_s(self, request_id: str, now_s: float) -> float:
        """How much longer it may wait."""
        return self._since_s[request_id] + self._max_s - now_s

    def oldest_s(self, now_s: float) -> float:
        """How long the one has waited that waits longest."""
        return max(0.0, now_s - next(iter(self._since_s.values()), now_s))

    def too_long(self, now_s: float) -> Exhausted:
        """What one hears that has waited as long as it may."""
        return self.exhausted(f"no first token within {self._max_s:g} s", now_s)

    def retry_after_s(self, now_s: float) -> float:
        """When those who wait now will have been served, at the pace of the last ones. Whole seconds, 1 at least."""
        pace_s = self.oldest_s(now_s)
        if self._served_s:
            pace_s = len(self._since_s) * (now_s - self._served_s[0]) / len(self._served_s)
        return float(math.ceil(min(max(pace_s, 1.0), MOST_RETRY_AFTER_S)))

    def exhausted(self, why: str, now_s: float) -> Exhausted:
        """There is no room, and `why`; with a hint when there may be."""
        after_s = self.retry_after_s(now_s)
        waits = f"{len(self._since_s)} wait for their first token, the oldest for {self.oldest_s(now_s):.1f} s"
        return Exhausted(f"{why}: {waits}; try again in {after_s:.0f} s", retry_after_s=after_s)

    def check_integrity(self) -> None:
        """Raises Bug if more wait than may."""
        if len(self._since_s) > self._max_requests:
            raise Bug(f"{len(self._since_s)} requests wait, of {self._max_requests} that may")
        if self.by_client.total() != len(self._since_s):
            raise Bug(f"{len(self._since_s)} requests wait, {self.by_client.total()} of clients")
