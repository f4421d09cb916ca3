"""What to do when pages run out. Pure.

First reservations are asked back that nobody fills yet, latest first; then sequences are retracted: those with the
fewest generated tokens, and among them those with the longest prompts. The oldest is never among them, so there is
always one that runs to its end. Relief begins a few tokens before the last page is gone, and makes room for more than
that, so that the others run on for a while before there is need of it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.decode_book import DecodeBook
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence

AHEAD_TOKENS: Final = 4
"""Relief begins when not everybody could go on for so long: copying to host memory takes a few steps."""


@dataclass(slots=True)
class Relief:
    """Reservations to ask back, and sequences to retract."""

    cancel: list[DecodeSequence] = field(default_factory=list)
    victims: list[DecodeSequence] = field(default_factory=list)


def growing(book: DecodeBook) -> list[DecodeSequence]:
    """Those that will need pages, oldest first."""
    return sorted(book.where(lambda s: s.has_work or (s.restoring and not s.over)), key=lambda s: s.age)


def demand(sequences: Iterable[DecodeSequence], tokens: int, page_size: int) -> int:
    """Pages that are missing for `tokens` more tokens of each."""
    return sum(pages_for(s.position + min(tokens, s.left), page_size) - len(s.pages) for s in sequences)


def plan_relief(
    book: DecodeBook, going: Sequence[DecodeSequence], available: int, page_size: int, run_on: int
) -> Relief:
    """`going` are those that grow; `available` pages are free, or will be without anybody losing them. Makes room for
    `run_on` tokens of each."""
    relief = Relief()
    if demand(going, AHEAD_TOKENS, page_size) <= available:
        return relief
    for sequence in sorted(book.where(lambda s: s.cancellable), key=lambda s: s.age, reverse=True):
        if demand(going, run_on, page_size) <= available:
            return relief
        relief.cancel.append(sequence)
        available += len(sequence.pages)
    if demand(going, AHEAD_TOKENS, page_size) <= available:
        return relief
    victims = sorted((s for s in going[1:] if s.has_work), key=_sacrifice)
    missing = demand(going, run_on, page_size) - available
    for victim in victims:
        if missing <= 0:
            break
        missing -= len(victim.pages) + demand([victim], run_on, page_size)
        relief.victims.append(victim)
    return relief


def _sacrifice(sequence: DecodeSequence) -> tuple[int, int, float]:
    """Orders victims: least lost first."""
    return sequence.received, -sequence.prompt_tokens, -sequence.arrived_s
