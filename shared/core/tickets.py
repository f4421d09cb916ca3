"""What one leg of a KV transfer knows of its ticket. A broker started again rebuilds tickets from both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stagemesh.shared.core.identity import InstanceRef, RequestRef


class LegState(Enum):
    """WAITING: no pages yet. RESERVED: pages are set aside. FILLING (prefill): writes may be under way. COMMITTED
    (decode): all KV is here. ENDING: given up, but prefill has writes under way, decode has pages in quarantine."""

    WAITING = "waiting"
    RESERVED = "reserved"
    FILLING = "filling"
    COMMITTED = "committed"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class TicketLeg:
    """`peer` is the other leg. `pages` are those of the decode instance, once they are reserved. `doubtful_writers` are
    ranks that have ended without proof that no byte of theirs arrives any more."""

    ticket_id: str
    request: RequestRef
    peer: InstanceRef
    prompt_tokens: int
    max_tokens: int
    state: LegState
    pages: tuple[int, ...] = ()
    doubtful_writers: frozenset[int] = frozenset()
