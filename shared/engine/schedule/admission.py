"""Who gets pages: retracted sequences in order of age, then new requests in order of priority. Pure.

One budget for the whole instance: what every sequence that has pages, or had them, is expected to hold in the end. The
expected growth is `conservativeness` times what finished requests teach, but never less than RUN_ON_PAGES pages: that
is also what a retraction makes room for, so nobody is brought back only to be retracted again at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.decode_book import DecodeBook
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.engine.schedule.lengths import LengthEstimator
from stagemesh.shared.errors import Rejected
from stagemesh.shared.fsm.sequence import SequenceState

RUN_ON_PAGES: Final = 2
MOST_CONSERVATIVE: Final = 10.0
LOOK_PAST: Final = 8
"""A request that does not fit is passed by so many at most, and there are so many at most that are passed."""
LOOK_PAST_S: Final = 1.0
"""Nobody passes a request that has not fitted for so long."""


@dataclass(slots=True)
class Growth:
    """What a sequence is expected to need. Changing `conservativeness` takes effect with the next question."""

    page_size: int
    conservativeness: float = 1.0
    estimator: LengthEstimator = field(default_factory=LengthEstimator)

    def set_conservativeness(self, value: float) -> None:
        """Raises Rejected unless it is in [0, MOST_CONSERVATIVE]."""
        if not 0.0 <= value <= MOST_CONSERVATIVE:
            raise Rejected("schedule_conservativeness", f"must be in 0..{MOST_CONSERVATIVE:g}, got {value}")
        self.conservativeness = value

    def tokens(self, sequence: DecodeSequence) -> int:
        """New tokens to come, as the budget counts them. A sequence that has lost its KV once is not to lose it again:
        it is expected to make what such requests make, however bold the setting."""
        factor = max(1.0, self.conservativeness) if sequence.recompute else self.conservativeness
        expected = factor * self.estimator.remaining(sequence.sampling, max(1, sequence.issued))
        return min(sequence.left, max(round(expected), self.run_on))

    def pages(self, sequence: DecodeSequence) -> int:
        """All pages that it is expected to hold in the end."""
        return pages_for(sequence.position + self.tokens(sequence), self.page_size)

    def all_tokens(self, sequence: DecodeSequence) -> int:
        """New tokens in all, as expected now."""
        return sequence.sampling.max_tokens - sequence.left + self.tokens(sequence)

    @property
    def run_on(self) -> int:
        """Tokens."""
        return RUN_ON_PAGES * self.page_size


@dataclass(slots=True)
class Room:
    """What is left for others: of the budget, in pages; of the free pages; of the sequences that may run. An empty
    instance has `whole` as its budget."""

    whole: int
    budget: int
    free: int
    slots: int


def room_to_resume(book: DecodeBook, growth: Growth, whole: int, freeing: int, free: int, max_running: int) -> Room:
    """`whole` pages are not in quarantine; of those, `freeing` are being freed."""
    active = book.where(lambda s: s.active)
    over = sum(len(s.pages) for s in book if s.over)
    budget = whole - freeing - over - sum(growth.pages(s) for s in active)
    return Room(whole, budget, free, max_running - len(active))


def to_resume(book: DecodeBook, growth: Growth, room: Room) -> list[DecodeSequence]:
    """Retracted sequences, oldest first, as many as fit; nobody before one that is older. If nothing runs, the oldest
    needs room only to go on for a while. `room` is what is left after them."""
    chosen: list[DecodeSequence] = []
    for sequence in sorted(book.where(lambda s: s.suspended), key=lambda s: s.age):
        need, now = growth.pages(sequence), pages_for(sequence.position, growth.page_size)
        fits = need <= room.budget and room.slots > 0
        if not sequence.resumable or now > room.free:
            break
        if not fits and (chosen or not _may_go_on(book, sequence, growth, room)):
            break
        chosen.append(sequence)
        room.budget, room.free, room.slots = room.budget - need, room.free - now, room.slots - 1
    return chosen


def _may_go_on(book: DecodeBook, sequence: DecodeSequence, growth: Growth, room: Room) -> bool:
    if any(s.restoring or s.state is SequenceState.RUNNING for s in book):
        return False  # they will make room
    tokens = sequence.position + min(sequence.left, growth.run_on)
    return pages_for(tokens, growth.page_size) <= room.free


def to_admit(
    candidates: Iterable[DecodeSequence], book: DecodeBook, growth: Growth, room: Room, now_s: float
) -> list[DecodeSequence]:
    """Those of `candidates` that fit, in their order. What the retracted ones need is set aside, so nobody new delays
    them. A request that does not fit is passed by a few, for a while; by everybody as long as what is in quarantine
    keeps it from fitting an empty instance."""
    room.budget -= sum(growth.pages(s) for s in book if s.suspended)
    room.slots -= sum(1 for s in book if s.suspended)
    chosen: list[DecodeSequence] = []
    blocked: list[DecodeSequence] = []
    for sequence in candidates:
        need = growth.pages(sequence)
        if room.slots <= 0 or not all(_may_be_passed(s, now_s) for s in blocked):
            break
        if need > room.whole:
            continue
        if need > room.budget:
            sequence.blocked_s = now_s if sequence.blocked_s is None else sequence.blocked_s
            blocked.append(sequence)
            if len(blocked) > LOOK_PAST:
                break
            continue
        for other in blocked:
            other.passed += 1
        chosen.append(sequence)
        room.budget, room.slots = room.budget - need, room.slots - 1
    return chosen


def _may_be_passed(sequence: DecodeSequence, now_s: float) -> bool:
    since_s = now_s if sequence.blocked_s is None else sequence.blocked_s
    return sequence.passed < LOOK_PAST and now_s - since_s < LOOK_PAST_S
