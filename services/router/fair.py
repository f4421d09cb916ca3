"""Whose request is sent off next, where not all can be at once: clients share the turns, whatever each asks for. Pure.

added --its client's turn has come, and it is its client's first--> taken
   `--gone, or it makes room for another client's--> discarded

Start-time fair queueing: a client's next turn begins where its last one ended, and a turn is as long as what the
request costs, divided by the client's weight. The turn that begins first is taken. A client that has been away begins
now, so that nothing can be saved up; one that leaves and comes back in the middle of a turn goes on behind it.
Over any time in which two clients both have requests here, what they get for their weight differs by one turn of each
at most. (P. Goyal, H. Vin, H. Cheng: Start-time fair queueing, SIGCOMM 1996.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stagemesh.shared.errors import Bug

Place = tuple[float, int, str]
"""What a request's place among its client's depends on: its order, when it came, and its id."""


@dataclass(slots=True)
class _Queue:
    """A client's requests, and when its next turn begins."""

    weight: float = 1.0
    begins: float = 0.0
    places: list[Place] = field(default_factory=list)  # sorted


class FairLine:
    """Requests of all clients. Within a client's the lowest `order` goes first."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}  # of clients that wait, or whose turn is not over
        self._where: dict[str, tuple[str, Place, float]] = {}  # client, place and cost, by request
        self._now = 0.0  # when the turn began that was taken last
        self._count = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._where

    def add(self, request_id: str, client: str, *, weight: float, order: float, cost: float) -> None:
        """`cost` is above 0. A weight that has changed holds from the client's next turn on."""
        queue = self._queues.setdefault(client, _Queue())
        if not queue.places:
            queue.begins = max(queue.begins, self._now)
        queue.weight = weight
        self._count += 1
        place = (order, self._count, request_id)
        insort(queue.places, place)
        self._where[request_id] = (client, place, cost)

    def take(self) -> str | None:
        """The request whose turn it is; None if nobody waits."""
        waiting = [(queue.begins, client) for client, queue in self._queues.items() if queue.places]
        if not waiting:
            return None
        self._now, client = min(waiting)
        queue = self._queues[client]
        request_id = queue.places.pop(0)[2]
        _, _, cost = self._where.pop(request_id)
        queue.begins += cost / queue.weight
        self._forget()
        return request_id

    def discard(self, request_id: str) -> None:
        """It waits no more. A no-op for those that do not."""
        if (known := self._where.pop(request_id, None)) is not None:
            client, place, _ = known
            places = self._queues[client].places
            del places[bisect_left(places, place)]

    def from_last(self, client: str) -> Iterator[str]:
        """The requests of that client, those first that would be taken last."""
        queue = self._queues.get(client)
        return (request_id for _, _, request_id in reversed([] if queue is None else queue.places))

    def last_of(self, client: str) -> str | None:
        """The request of that client that would be taken last."""
        return next(self.from_last(client), None)

    def _forget(self) -> None:
        """A client without requests whose turn is over is as good as a new one."""
        for client in [c for c, queue in self._queues.items() if not queue.places and queue.begins <= self._now]:
            del self._queues[client]

    def check_integrity(self) -> None:
        """Raises Bug if a request is in no queue, or in two."""
        queued = sorted(place[2] for queue in self._queues.values() for place in queue.places)
        if queued != sorted(self._where):
            raise Bug(f"{len(queued)} requests in queues, {len(self._where)} known")


def over_their_share(
    waiting: Mapping[str, int], weights: Mapping[str, float], client: str, more: int = 1
) -> Iterable[str]:
    """The clients that have more places than `client` would have with so many more, for their weight; the most first.
    Who is not in `weights` has weight 1."""

    def share(name: str, more: int = 0) -> float:
        return (waiting.get(name, 0) + more) / weights.get(name, 1.0)

    ours = share(client, more)
    return sorted((name for name in waiting if name != client and share(name) > ours), key=share, reverse=True)
