"""The pages of a decode instance: who is let in, and who must give way.

                    .--asked back--> [does anybody write to them?] --unreserved--> free, asked for again
reserved pages -----|                                   `--keep--> the sequence goes its way
pages that run out -|
                    `--retract--> [every stage copies] --copied--> free   ...   --resume--> [copies back] --> running
                             `--no room in host memory--> the sequence ends: RECOMPUTE
"""

from __future__ import annotations

import time

from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.admission import Room, room_to_resume, to_admit, to_resume
from stagemesh.shared.engine.schedule.decode_core import DecodeCore
from stagemesh.shared.engine.schedule.decode_state import Admission, Asked, DecodeSequence
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.pressure import AHEAD_TOKENS, growing, plan_relief
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class DecodeMemory:
    """Carries out what `admission` and `pressure` choose."""

    def __init__(
        self, core: DecodeCore, *, max_running: int, pp_size: int, host_pages: int, priority_ageing_s: float
    ) -> None:
        self._core = core
        self._pp_size, self._ageing_s = pp_size, priority_ageing_s
        self.max_running, self.host_pages = max_running, host_pages
        self.reserving: dict[str, Asked] = {}  # tickets that wait for pages, oldest first
        self.oldest: DecodeSequence | None = None  # of those that run, if pages are short: it is given its page first

    # -- what is told --

    def unreserved(self, ticket_id: str) -> None:
        """Nobody writes to the pages that were asked back."""
        sequence = self._core.sequences.of_ticket(ticket_id)
        if sequence is not None and sequence.asked_back:
            sequence.asked_back = False
            sequence.move(SequenceEvent.UNRESERVE)
            self._core.give_back(sequence)
            self._core.stats.reservations_cancelled += 1

    def keep(self, ticket_id: str) -> None:
        sequence = self._core.sequences.of_ticket(ticket_id)
        if sequence is not None and sequence.asked_back:
            sequence.asked_back, sequence.kept = False, True

    def copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        sequence = self._core.sequences.of_handle(handle)
        if pp_rank not in sequence.copying or restored is not sequence.restoring:
            raise Bug(f"stage {pp_rank} has copied sequence {handle} (restored: {restored}), which it was not told to")
        sequence.copying.remove(pp_rank)
        if sequence.copying:
            return
        if restored:
            self._restored(sequence)
        else:
            self._core.give_back(sequence)  # every stage has run all steps that name them
        self._core.forget_if_done(sequence)

    def _restored(self, sequence: DecodeSequence) -> None:
        sequence.restoring, sequence.host_pages = False, 0
        if not sequence.over:
            self._core.stats.retracted.record(time.monotonic() - sequence.since_s)
            sequence.move(SequenceEvent.RESUME)
            self._core.enter(sequence)
            self._core.stats.resumed += 1

    # -- making room --

    def relieve(self) -> None:
        core = self._core
        self.oldest = None
        if core.pages.num_free >= sum(core.microbatches.sizes) * pages_for(AHEAD_TOKENS, core.page_size):
            return  # as nearly always
        going = growing(core.sequences)
        self.oldest = next((s for s in going if s.has_work), None)
        asked_back = sum(len(s.pages) for s in core.sequences if s.asked_back)
        available = core.pages.num_free + core.issuer.num_freeing + core.sequences.leaving_pages + asked_back
        relief = plan_relief(core.sequences, going, available, core.page_size, core.growth.run_on)
        for sequence in relief.cancel:
            sequence.asked_back = True
            core.actions.cancelled.append(sequence.ticket_id)
        if any(core.issuer.is_joining(victim.handle) for victim in relief.victims):
            core.flush()  # they join their stages before they leave
        for victim in relief.victims:
            self._retract(victim)

    def _retract(self, sequence: DecodeSequence) -> None:
        core = self._core
        if core.sequences.host_pages + len(sequence.pages) > self.host_pages:
            core.stats.recomputed += 1
            core.stats.recomputed_tokens += sequence.position
            core.output(SequenceOutput(sequence.request, end=SequenceEnd.RECOMPUTE))
            core.end(sequence, SequenceEvent.ABORT)
            return
        core.stats.retractions += 1
        sequence.move(SequenceEvent.RETRACT)
        core.leave(sequence)
        sequence.host_pages, sequence.source = len(sequence.pages), None
        sequence.copying = set(range(self._pp_size))
        core.issuer.retract(sequence.handle)

    # -- letting in --

    def let_in(self) -> None:
        """Retracted sequences first, then new ones."""
        core = self._core
        if not self.reserving and not core.sequences.any_suspended:
            return
        whole, freeing = core.pages.num_pages - core.pages.num_quarantined, core.issuer.num_freeing
        room = room_to_resume(core.sequences, core.growth, whole, freeing, core.pages.num_free, self.max_running)
        for sequence in to_resume(core.sequences, core.growth, room):
            self._resume(sequence)
        self._admit(room)

    def _resume(self, sequence: DecodeSequence) -> None:
        self._core.take(sequence, sequence.position)
        sequence.restoring, sequence.copying = True, set(range(self._pp_size))
        self._core.issuer.resume(sequence.handle, sequence.pages)

    def _admit(self, room: Room) -> None:
        """In order of priority, among those whose router has announced them."""
        candidates: list[DecodeSequence] = []
        for ticket_id, asked in list(self.reserving.items()):
            sequence = self._core.sequences.of_request(asked.request)
            if sequence is None or sequence.ticket_id != ticket_id:
                continue
            if sequence.state is SequenceState.WAITING:
                candidates.append(sequence)
            elif sequence.state is SequenceState.RESERVED and not sequence.asked_back:
                self._answer(sequence)  # its first answer was lost
        candidates.sort(key=lambda s: s.turn(self._ageing_s))
        for sequence in to_admit(candidates, self._core.sequences, self._core.growth, room, time.monotonic()):
            self._core.take(sequence, sequence.prompt_tokens)
            sequence.predicted_tokens = self._core.growth.all_tokens(sequence)
            sequence.move(SequenceEvent.RESERVE)
            self._core.stats.reserve_wait.record(sequence.since_s - self.reserving[sequence.ticket_id].since_s)
            self._answer(sequence)

    def _answer(self, sequence: DecodeSequence) -> None:
        del self.reserving[sequence.ticket_id]
        self._core.actions.admissions.append(Admission(sequence.ticket_id, tuple(sequence.pages)))
