"""Why the sequences of a decode instance wait, for people and metrics."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.fsm.sequence import SequenceState


class Reason(Enum):
    PREFILL = "prefill"  # to ask for pages: its prompt does not start soon
    PAGES = "pages"
    SLOTS = "slots"  # as many run as may
    KV = "kv"  # to be written and committed
    FIRST_TOKEN = "first_token"
    COPYING = "copying"  # to host memory, or back
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many wait, and how long the one that has waited longest has."""

    count: int = 0
    oldest_s: float = 0.0


def reason_of(sequence: DecodeSequence, reserving: Container[str], slots_free: int) -> Reason | None:
    """None if it runs or is over. `reserving` are the tickets that ask for pages; `slots_free` more might run."""
    match sequence.state:
        case SequenceState.WAITING if sequence.ticket_id not in reserving:
            return Reason.PREFILL
        case SequenceState.WAITING:
            return Reason.PAGES if slots_free > 0 else Reason.SLOTS
        case SequenceState.RESERVED:
            return Reason.FIRST_TOKEN if sequence.committed else Reason.KV
        case SequenceState.RETRACTED:
            return Reason.COPYING if sequence.copying else Reason.RESUME
    return None


def waiting(scheduler: DecodeScheduler, now_s: float) -> dict[Reason, Waiting]:
    """Of every reason, how many sequences are in such a state, and since when the first of them. `now_s` is
    CLOCK_MONOTONIC."""
    found, slots_free = dict.fromkeys(Reason, Waiting()), scheduler.slots_free
    for sequence in scheduler.sequences:
        reason = reason_of(sequence, scheduler.reserving, slots_free)
        if reason is not None:
            before = found[reason]
            found[reason] = Waiting(before.count + 1, max(before.oldest_s, now_s - sequence.since_s))
    return found
