"""The steps of a decode instance: whose turn it is, and who has the page that the next token needs."""

from __future__ import annotations

import time

import numpy as np

from stagemesh.shared.core.commands import EMPTY, FROM_STEP, SAMPLE, Command
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.decode_core import DecodeCore
from stagemesh.shared.engine.schedule.decode_state import MAX_IN_FLIGHT, DecodeSequence, FirstStep
from stagemesh.shared.engine.schedule.pressure import AHEAD_TOKENS, demand


class DecodeSteps:
    """A sequence that finds no page is left out of its microbatch's step, and waits. The last pages are kept for the
    `oldest` of those that run."""

    def __init__(self, core: DecodeCore, *, run_ahead: int) -> None:
        self._core, self._run_ahead = core, run_ahead
        self._oldest: DecodeSequence | None = None
        self.is_full = False  # as many steps are out as may be

    def issue(self, oldest: DecodeSequence | None, *, is_due: bool = True) -> bool:
        """As many steps as may be out; the last of those that run ahead only if it `is_due`. False if it was not."""
        self._oldest = oldest
        while self._room() > (0 if is_due or not self._run_ahead else 1) and (command := self._next()) is not None:
            self._core.actions.commands.append(command)
        self.is_full = not self._room()
        return is_due or self._room() != 1

    def _room(self) -> int:
        """How many more steps may be out."""
        active = sum(1 for index in range(len(self._core.microbatches.sizes)) if self._has_work(index))
        return max(0, active + self._run_ahead - len(self._core.issuer.outstanding))

    def _next(self) -> Command | None:
        microbatches = self._core.microbatches
        index = microbatches.next_turn(self._has_work)
        if index is None:
            return None
        rows = [s for s in self._members(index) if s.has_work and s.in_flight < MAX_IN_FLIGHT and self._grow(s)]
        if not rows:
            return None  # its turn, but both of its steps are out: the next result brings us back here
        microbatches.take_turn(index)
        return self._step(index, rows)

    def _members(self, index: int) -> list[DecodeSequence]:
        return [self._core.sequences.of_handle(handle) for handle in self._core.microbatches.members(index)]

    def _has_work(self, index: int) -> bool:
        """It has something to run: now, or when its steps are back."""
        return any(s.has_work and (s.in_flight >= MAX_IN_FLIGHT or self._may_grow(s)) for s in self._members(index))

    def _step(self, index: int, sequences: list[DecodeSequence]) -> Command:
        issuer, stats = self._core.issuer, self._core.stats
        number = issuer.steps_issued + 1
        rows = np.zeros((len(sequences), 6), dtype=np.int64)
        tokens: list[int] = []
        for row, sequence in zip(rows, sequences, strict=True):
            source = sequence.source if sequence.in_flight else None  # an id that is back is sent as it is
            row[:] = (sequence.handle, sequence.position, 1, *(source or (0, 0)), SAMPLE | (FROM_STEP if source else 0))
            if source is None:
                tokens.append(sequence.latest)
                if sequence.issued == 1:
                    stats.first_step_wait.record(time.monotonic() - sequence.committed_s)
                    self._core.actions.first_steps.append(FirstStep(sequence.request, sequence.ticket_id, number))
        stats.step_rows.record(len(sequences))
        for at, sequence in enumerate(sequences):
            sequence.source = (number, at)
            sequence.issued += 1
            sequence.in_flight += 1
        return issuer.issue_step(index, rows, np.array(tokens, dtype=np.int64) if tokens else EMPTY)

    def _missing(self, sequence: DecodeSequence) -> int:
        """Pages that it needs for the token at its next position: none, or one."""
        return pages_for(sequence.position + 1, self._core.page_size) - len(sequence.pages)

    def _may_grow(self, sequence: DecodeSequence) -> bool:
        missing = self._missing(sequence)
        return not missing or self._core.pages.num_free >= missing + self._owed_before(sequence)

    def _owed_before(self, sequence: DecodeSequence) -> int:
        """Pages that the oldest needs soon."""
        if self._oldest is None or self._oldest is sequence or not self._oldest.has_work:
            return 0
        return demand([self._oldest], AHEAD_TOKENS, self._core.page_size)

    def _grow(self, sequence: DecodeSequence) -> bool:
        """False if it must wait for a page."""
        missing = self._missing(sequence)
        if not self._may_grow(sequence):
            self._core.stats.stalled_rows += 1
            return False
        if missing:
            pages = self._core.pages.allocate(missing) or []
            sequence.pages += pages
            self._core.issuer.add_pages(sequence.handle, pages)
        return True
