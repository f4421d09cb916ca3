"""Which instance is to end, so that its reaped exit frees the pages that its writes in doubt hold. Pure; seconds of one
clock.

a write ends in doubt --its writer may be spared--> told to end --> started again under a new epoch --> the next one
                      `--it is the only one that serves, and busy: once it is idle, or holds too much of a pool

One at a time, so that several breaks at once do not take all instances of a role away, and the next one after a pause
that doubles while connections go on breaking. A ticket ends one process at most: where no exit is ever reported, none
after it would help.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stagemesh.services.broker.ticket import Ticket
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef

IDLE_S: Final = 5.0
"""Without a prompt for so long, an instance is not likely to be missed for the seconds of its restart."""
LATE_S: Final = 60.0
"""Since a ticket has failed. If its writer has an epoch after that by now and is not reaped, it lives on in another
role, or its exit was never reported."""
BACK_S: Final = 120.0
"""After which an instance that was told to end is waited for no more."""
FIRST_PAUSE_S, MOST_PAUSE_S, RECENT_S = 1.0, 30.0, 300.0


@dataclass(frozen=True, slots=True)
class Standing:
    """`idle_s`: for how long it has had nothing to do."""

    info: InstanceInfo
    idle_s: float


class Reason(Enum):
    """Why an instance may be spared now."""

    OTHERS = "others serve"
    IDLE = "idle"
    SHARE = "too many pages"


@dataclass(frozen=True, slots=True)
class Renew:
    """Tell `ref` to end. `pages` are those in doubt by it."""

    ref: InstanceRef
    reason: Reason
    tickets: tuple[str, ...]
    pages: int


@dataclass(frozen=True, slots=True)
class Spare:
    """`ref` is the only one of its role that serves, and busy: it holds `pages` until it may go."""

    ref: InstanceRef
    pages: int


@dataclass(frozen=True, slots=True)
class _UnderWay:
    renew: Renew
    since_s: float


class Renewals:
    """`max_share` of a decode instance's pages may be in doubt by the only instance of a role while it is busy."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._told: set[str] = set()  # tickets for which an instance has been told to end
        self._under_way: _UnderWay | None = None
        self._begun: deque[float] = deque()
        self._not_before_s = float("-inf")
        self._spared: set[InstanceRef] = set()

    def look(self, tickets: Iterable[Ticket], standings: Sequence[Standing], now_s: float) -> Renew | Spare | None:
        """What is to be done now. `tickets` are those in doubt whose writers are not known to be reaped, `standings` of
        all instances. That one is spared is said once."""
        doubtful = list(tickets)
        self._told.intersection_update(ticket.ticket_id for ticket in doubtful)
        self._spared.intersection_update(standing.info.ref for standing in standings)
        if self._waits(standings, now_s):
            return None
        spared: Spare | None = None
        for standing in standings:
            info = standing.info
            mine = [t for t in doubtful if t.ticket_id not in self._told and _is_of(t, info.ref, now_s)]
            if not mine or not info.accepting:  # who takes nothing is drained already: an operator has plans with it
                continue
            reason = self._reason(standing, mine, standings)
            pages = sum(ticket.num_pages for ticket in mine)
            if reason is not None:
                return self._begin(Renew(info.ref, reason, tuple(t.ticket_id for t in mine), pages), now_s)
            spared = spared or (None if info.ref in self._spared else Spare(info.ref, pages))
        if spared is not None:
            self._spared.add(spared.ref)
        return spared

    def failed(self, now_s: float) -> None:
        """It could not be told."""
        assert self._under_way is not None
        self._told.difference_update(self._under_way.renew.tickets)
        self._end(now_s)

    def _begin(self, renew: Renew, now_s: float) -> Renew:
        self._under_way = _UnderWay(renew, now_s)
        self._told.update(renew.tickets)
        self._begun.append(now_s)
        return renew

    def _end(self, now_s: float) -> None:
        while self._begun and now_s - self._begun[0] > RECENT_S:
            self._begun.popleft()
        self._under_way = None
        self._not_before_s = now_s + min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (max(1, len(self._begun)) - 1))

    def _waits(self, standings: Iterable[Standing], now_s: float) -> bool:
        if (under_way := self._under_way) is not None:
            ref, here = under_way.renew.ref, [standing.info for standing in standings if standing.info.accepting]
            is_back = any(info.ref.name == ref.name and info.ref.epoch > ref.epoch for info in here)
            if is_back or now_s - under_way.since_s > BACK_S:
                self._end(now_s)
        return self._under_way is not None or now_s < self._not_before_s

    def _reason(self, standing: Standing, mine: Iterable[Ticket], standings: Iterable[Standing]) -> Reason | None:
        own = standing.info
        infos = [other.info for other in standings]
        if any(info.role is own.role and info.accepting for info in infos if info.ref != own.ref):
            return Reason.OTHERS
        if standing.idle_s >= IDLE_S:
            return Reason.IDLE
        sizes = {info.ref: info.manifest.num_pages for info in infos}
        held = dict.fromkeys(sizes, 0)
        for ticket in mine:
            if ticket.decode in held:
                held[ticket.decode] += ticket.num_pages
        return Reason.SHARE if any(held[ref] > self._max_share * sizes[ref] for ref in held) else None


def _is_of(ticket: Ticket, ref: InstanceRef, now_s: float) -> bool:
    """Whether the processes of `ref` are those that may still write."""
    known = ticket.prefill
    return known == ref or (known.name == ref.name and known.epoch < ref.epoch and now_s - ticket.since_s > LATE_S)
