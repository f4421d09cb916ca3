"""What a broker that has just started learns from the heads: the tickets of the broker before it. Pure.

a head joins, with its legs --both legs, or one and the peer's word--> a verdict a ticket
                               `--nobody comes within the bound: the other leg is gone

Instances and routers that lived through the broker's absence find it as they have left it: nobody is lost before all
could come back. What cannot be known is decided for safety: pages that may be written to wait for proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from stagemesh.shared.core.directory import Role
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.errors import ProtocolViolation


class Verdict(Enum):
    """OPEN: no pages yet. TAKEN_BACK: no pages any more, which the prefill side does not know. RESERVED, FILLING: it
    goes on. QUIESCE: it has failed, and the pages wait for proof. FAIL: it has failed, nothing is to be protected.
    DONE: the decode side has taken it over."""

    OPEN = "open"
    TAKEN_BACK = "taken back"
    RESERVED = "reserved"
    FILLING = "filling"
    QUIESCE = "quiesce"
    FAIL = "fail"
    DONE = "done"


class Absence(Enum):
    """Why there is no leg: the instance is here and says nothing of the ticket, or it is not here."""

    SILENT = "silent"
    GONE = "gone"


Side = LegState | Absence
_L, _A, _V = LegState, Absence, Verdict
VERDICTS: Final[Mapping[tuple[Side, Side], Verdict]] = MappingProxyType(
    {
        # (prefill, decode)
        (_L.WAITING, _L.WAITING): _V.OPEN,
        (_L.WAITING, _L.RESERVED): _V.RESERVED,  # the pages were on their way
        (_L.WAITING, _L.COMMITTED): _V.DONE,
        (_L.WAITING, _L.ENDING): _V.QUIESCE,
        (_L.WAITING, _A.SILENT): _V.FAIL,  # or its submit is on its way there: it runs again
        (_L.WAITING, _A.GONE): _V.FAIL,
        (_L.RESERVED, _L.WAITING): _V.TAKEN_BACK,
        (_L.RESERVED, _L.RESERVED): _V.RESERVED,
        (_L.RESERVED, _L.COMMITTED): _V.DONE,
        (_L.RESERVED, _L.ENDING): _V.QUIESCE,
        (_L.RESERVED, _A.SILENT): _V.FAIL,
        (_L.RESERVED, _A.GONE): _V.FAIL,
        (_L.FILLING, _L.WAITING): _V.FAIL,
        (_L.FILLING, _L.RESERVED): _V.FILLING,
        (_L.FILLING, _L.COMMITTED): _V.DONE,  # a writer waits for its answer
        (_L.FILLING, _L.ENDING): _V.QUIESCE,
        (_L.FILLING, _A.SILENT): _V.FAIL,  # it was taken over, and is through; or its pages were proven free
        (_L.FILLING, _A.GONE): _V.FAIL,
        (_L.ENDING, _L.WAITING): _V.FAIL,
        (_L.ENDING, _L.RESERVED): _V.QUIESCE,
        (_L.ENDING, _L.COMMITTED): _V.DONE,
        (_L.ENDING, _L.ENDING): _V.QUIESCE,
        (_L.ENDING, _A.SILENT): _V.FAIL,
        (_L.ENDING, _A.GONE): _V.FAIL,
        (_A.SILENT, _L.WAITING): _V.FAIL,
        (_A.SILENT, _L.RESERVED): _V.QUIESCE,  # it has given up; its word is asked for
        (_A.SILENT, _L.COMMITTED): _V.DONE,
        (_A.SILENT, _L.ENDING): _V.QUIESCE,
        (_A.GONE, _L.WAITING): _V.FAIL,
        (_A.GONE, _L.RESERVED): _V.QUIESCE,
        (_A.GONE, _L.COMMITTED): _V.DONE,
        (_A.GONE, _L.ENDING): _V.QUIESCE,
    }
)


@dataclass(frozen=True, slots=True)
class Half:
    """A leg, and whose it is."""

    owner: InstanceRef
    leg: TicketLeg


@dataclass(frozen=True, slots=True)
class Found:
    """A ticket of the broker before this one, and what becomes of it. `leg` is the one that knows more of it."""

    leg: TicketLeg
    prefill: InstanceRef
    decode: InstanceRef
    verdict: Verdict
    doubtful_writers: frozenset[int] = frozenset()
    reason: str = ""


def check_leg(role: Role, leg: TicketLeg) -> TicketLeg:
    """Raises ProtocolViolation for a leg that an instance of that role cannot have."""
    wrong = LegState.COMMITTED if role is Role.PREFILL else LegState.FILLING
    if leg.state is wrong or not leg.ticket_id:
        raise ProtocolViolation(f"ticket {leg.ticket_id!r}: {leg.state.value} is no state of a {role.value} leg")
    return leg


class Gathering:
    """Halves of tickets until both sides are known. `names` are the instances that may come; once all have, or `end`
    is called, nobody is waited for."""

    def __init__(self, names: Iterable[str]) -> None:
        self._awaited = set(names)
        self._over = False
        self._here: dict[str, InstanceRef] = {}
        self._halves: dict[str, dict[Role, Half]] = {}

    def __len__(self) -> int:
        """Tickets of which not enough is known yet."""
        return len(self._halves)

    @property
    def over(self) -> bool:
        return self._over or not self._awaited

    def end(self) -> None:
        """Who is not here is gone, for all that can be known."""
        self._over = True

    def join(self, ref: InstanceRef, role: Role, legs: Iterable[TicketLeg]) -> None:
        """An instance is here, and these are all tickets that it knows."""
        self._here[ref.name] = ref
        self._awaited.discard(ref.name)
        for leg in legs:
            self._halves.setdefault(leg.ticket_id, {})[role] = Half(ref, leg)

    def lose(self, ref: InstanceRef) -> None:
        """It has gone again: what it said counts no more."""
        if self._here.get(ref.name) == ref:
            del self._here[ref.name]
        for ticket_id, halves in list(self._halves.items()):
            for role in [role for role, half in halves.items() if half.owner == ref]:
                del halves[role]
            if not halves:
                del self._halves[ticket_id]

    def take(self) -> list[Found]:
        """The tickets that can be decided on now; each is returned once."""
        found = []
        for ticket_id, halves in list(self._halves.items()):
            prefill, decode = halves.get(Role.PREFILL), halves.get(Role.DECODE)
            known = decode or prefill
            assert known is not None
            sides = self._side(prefill, known), self._side(decode, known)
            if sides[0] is None or sides[1] is None:
                continue
            del self._halves[ticket_id]
            if known.leg.request.request_id:  # else nobody but a writer in doubt remembers it: there is nothing to do
                found.append(_found(prefill, decode, sides[0], sides[1]))
        return found

    def _side(self, half: Half | None, other: Half) -> Side | None:
        """None: it may still come."""
        if half is not None:
            return half.leg.state
        here = self._here.get(other.leg.peer.name)
        if here == other.leg.peer:
            return Absence.SILENT
        return Absence.GONE if self.over or (here is not None and here.epoch > other.leg.peer.epoch) else None


def _found(prefill: Half | None, decode: Half | None, p_side: Side, d_side: Side) -> Found:
    known = decode or prefill
    assert known is not None
    verdict = VERDICTS[p_side, d_side]
    doubtful = prefill.leg.doubtful_writers if prefill is not None else frozenset()
    if prefill is not None and decode is not None and decode.leg.state is LegState.RESERVED:
        others = prefill.leg.pages != decode.leg.pages
        if verdict is Verdict.FILLING and (others or doubtful):
            verdict = Verdict.QUIESCE
        elif p_side is LegState.RESERVED and others:
            verdict = Verdict.TAKEN_BACK
    source = prefill.owner if prefill is not None else known.leg.peer
    target = decode.owner if decode is not None else known.leg.peer
    return Found(known.leg, source, target, verdict, doubtful, _reason(source, target, p_side, d_side))


def _reason(prefill: InstanceRef, decode: InstanceRef, p_side: Side, d_side: Side) -> str:
    for ref, side in ((prefill, p_side), (decode, d_side)):
        if side is Absence.GONE:
            return f"{ref} has not come back to a broker that was started again"
    for ref, side in ((prefill, p_side), (decode, d_side)):
        if side is Absence.SILENT:
            return f"{ref} knows no more of it, says a broker that was started again"
    return "it had failed before the broker was started again"
