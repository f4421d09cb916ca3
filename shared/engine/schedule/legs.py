"""What a scheduler's sequences are to their tickets, for a broker that has been started again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.engine.schedule.prefill_state import PrefillSequence
from stagemesh.shared.fsm.sequence import SequenceState

NOBODY = InstanceRef("", 0)
"""Where no router has said who the other leg is."""


def prefill_legs(sequences: Iterable[PrefillSequence]) -> Iterator[TicketLeg]:
    """Of prompts whose ticket is not over here."""
    for sequence in sequences:
        if sequence.ticket_id and (state := _prefill_state(sequence)) is not None:
            yield TicketLeg(
                sequence.ticket_id,
                sequence.request,
                sequence.peer or NOBODY,
                len(sequence.tokens),
                sequence.sampling.max_tokens,
                state,
                () if sequence.send is None else sequence.send.pages,
            )


def _prefill_state(sequence: PrefillSequence) -> LegState | None:
    if sequence.cancelled or sequence.over:
        giving_up = sequence.cancelled or sequence.state is SequenceState.ABORTED
        left = LegState.ENDING if giving_up else LegState.FILLING
        return left if sequence.unsettled else None  # else every stage has reported, and has been heard
    if sequence.state is SequenceState.WAITING:
        return LegState.WAITING
    may_write = sequence.filled or sequence.state is SequenceState.RUNNING
    return LegState.FILLING if may_write else LegState.RESERVED


def decode_legs(sequences: Iterable[DecodeSequence]) -> Iterator[TicketLeg]:
    """Of requests that are not over."""
    for sequence in sequences:
        if not sequence.over:
            state = LegState.WAITING
            if sequence.committed:
                state = LegState.COMMITTED
            elif sequence.state is SequenceState.RESERVED:
                state = LegState.RESERVED
            yield decode_leg(sequence, state)


def decode_leg(sequence: DecodeSequence, state: LegState) -> TicketLeg:
    pages = tuple(sequence.pages) if state in (LegState.RESERVED, LegState.ENDING) else ()
    peer, sampling = sequence.peer or NOBODY, sequence.sampling
    return TicketLeg(
        sequence.ticket_id, sequence.request, peer, sequence.prompt_tokens, sampling.max_tokens, state, pages
    )
