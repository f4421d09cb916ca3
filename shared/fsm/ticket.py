"""The life of a KV transfer.

opened --reserve--> reserved --fill--> filling --commit--> committed --release--> closed
reserved --unreserve--> opened                 the decode side is short of pages: it is asked again
opened, reserved --fail--> closed
filling --fail--> quiescing --quiesced--> closed

A writer announces `fill` before its first write: a ticket that fails earlier has nothing in flight, one that fails
later may have, and its pages wait for the proof that it has not.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from stagemesh.shared.fsm.table import Table


class TicketState(Enum):
    OPENED = "opened"
    RESERVED = "reserved"
    FILLING = "filling"
    COMMITTED = "committed"
    QUIESCING = "quiescing"
    CLOSED = "closed"


class TicketEvent(Enum):
    RESERVE = "reserve"
    UNRESERVE = "unreserve"
    FILL = "fill"
    COMMIT = "commit"
    FAIL = "fail"
    QUIESCED = "quiesced"
    RELEASE = "release"


_S, _E = TicketState, TicketEvent
TICKET: Final = Table(
    _S.OPENED,
    {
        (_S.OPENED, _E.RESERVE): _S.RESERVED,
        (_S.OPENED, _E.FAIL): _S.CLOSED,
        (_S.RESERVED, _E.UNRESERVE): _S.OPENED,
        (_S.RESERVED, _E.FILL): _S.FILLING,
        (_S.RESERVED, _E.FAIL): _S.CLOSED,
        (_S.FILLING, _E.COMMIT): _S.COMMITTED,
        (_S.FILLING, _E.FAIL): _S.QUIESCING,
        (_S.COMMITTED, _E.RELEASE): _S.CLOSED,
        (_S.QUIESCING, _E.QUIESCED): _S.CLOSED,
    },
)
