"""What must hold of the commands of a decode scheduler, whatever it decides."""

from __future__ import annotations

import time

from stagemesh.shared.core.commands import (
    COUNT,
    FLAGS,
    FROM_STEP,
    HANDLE,
    ROW_WIDTH,
    SAMPLE,
    SOURCE_ROW,
    SOURCE_STEP,
    START,
    Command,
    Join,
    Step,
)
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.admission import LOOK_PAST
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.fsm.sequence import SequenceState
from tests.support.decode_request import SimRequest


class CommandChecks:
    """Of one scheduler, from its first command on."""

    def __init__(
        self, scheduler: DecodeScheduler, by_ref: dict[RequestRef, SimRequest], *, microbatches: int, most_rows: int
    ) -> None:
        self._scheduler, self._by_ref = scheduler, by_ref
        self.microbatches, self._most_rows = microbatches, most_rows
        self.by_handle: dict[int, SimRequest] = {}
        self.dropped: set[int] = set()
        self.away: set[int] = set()  # handles that are retracted
        self.copies: dict[int, set[int]] = {}  # handle -> ranks that copy it
        self._issued: dict[int, int] = {}  # handle -> rows issued
        self._place: dict[int, tuple[int, int]] = {}  # handle -> step and row of its latest
        self.last_command = self.last_step = self.num_retracted = self.num_resumed = 0

    def check(self, command: Command, num_stages: int) -> None:
        self.last_command += 1
        assert command.number == self.last_command
        assert not command.cancels
        for handle in command.drops:
            assert handle in self.by_handle
            assert handle not in self.dropped
            assert not self._in_flight(handle)
            assert not self.copies.get(handle)
            self.dropped.add(handle)
        for join in command.joins:
            request = self._by_ref[join.request]
            assert request.committed
            assert join == Join(join.handle, request.ref, request.sampling, None, request.prompt_tokens)
            assert join.handle not in self.by_handle
            self.by_handle[join.handle] = request
        for handle in command.retracts:
            assert handle in self.by_handle.keys() - self.dropped - self.away
            self._place.pop(handle, None)
            self._copy(handle, num_stages)
            self.away.add(handle)
            self.num_retracted += 1
        for handle in command.resumes:
            assert handle in self.away - self.dropped
            assert not self._in_flight(handle)
            self._copy(handle, num_stages)
            self.away.remove(handle)
            self.num_resumed += 1
        if command.step is not None:
            self._check_step(command.step)

    def _copy(self, handle: int, num_stages: int) -> None:
        assert not self.copies.get(handle)
        self.copies[handle] = set(range(num_stages))

    def _check_step(self, step: Step) -> None:
        self.last_step += 1
        assert step.number == self.last_step
        assert 0 <= step.microbatch < self.microbatches
        assert step.rows.shape == (len(step.rows), ROW_WIDTH)
        assert 0 < len(step.rows) <= self._most_rows
        handles = step.rows[:, HANDLE].tolist()
        assert len(set(handles)) == len(handles)
        for at, row in enumerate(step.rows.tolist()):
            self._check_row(step.number, at, row)

    def _check_row(self, step: int, at: int, row: list[int]) -> None:
        handle = row[HANDLE]
        assert handle in self.by_handle.keys() - self.dropped - self.away
        assert not self.copies.get(handle)
        request, before = self.by_handle[handle], self._issued.get(handle, 0)
        assert (row[START], row[COUNT]) == (request.prompt_tokens + before, 1)
        assert before + 1 < request.sampling.max_tokens  # the first new token is not made here, the last one not run
        source = self._place.get(handle)
        if source is not None and source[0] not in self._scheduler.issuer.outstanding:
            source = None  # its id is back, and sent as it is
        assert row[FLAGS] == SAMPLE | (FROM_STEP if source else 0)
        assert (row[SOURCE_STEP], row[SOURCE_ROW]) == (source or (0, 0))
        self._issued[handle], self._place[handle] = before + 1, (step, at)
        assert self._in_flight(handle) <= 2

    def _in_flight(self, handle: int) -> int:
        outstanding = self._scheduler.issuer.outstanding.values()
        return sum(handle in step.rows[:, HANDLE].tolist() for step in outstanding)


class OrderChecks:
    """Who is let in before whom, and who gives way. Of one scheduler, poll by poll."""

    def __init__(self, scheduler: DecodeScheduler, *, most_running: int, ageing_s: float) -> None:
        self._scheduler, self._most_running, self._ageing_s = scheduler, most_running, ageing_s
        self._running: list[DecodeSequence] = []
        self._retracted: list[DecodeSequence] = []
        self._now_s = 0.0
        self.passed: dict[RequestRef, int] = {}  # by how many that came later in the order

    def before_poll(self) -> None:
        self._running = [s for s in self._scheduler.sequences if s.has_work]
        self._retracted = [s for s in self._scheduler.sequences if s.suspended]
        self._now_s = time.monotonic()

    def check(self, admitted: set[str]) -> None:
        """After it. `admitted` are tickets, among them those that were only told again."""
        sequences = list(self._scheduler.sequences)
        assert sum(s.active for s in sequences) <= self._most_running
        oldest = min(self._running, key=lambda s: s.age, default=None)
        assert oldest is None or oldest.state is SequenceState.RUNNING, "the oldest that ran was made to give way"
        left = [s.age for s in self._retracted if s.suspended]
        came = [s.age for s in self._retracted if s.restoring]
        assert not (left and came) or max(came) < min(left), "resumed before one that is older"
        for new in (s for s in sequences if s.ticket_id in admitted and s.since_s >= self._now_s):
            self._check_passed(new, sequences)
            if any(s.suspended for s in sequences):
                expected = sum(self._scheduler.growth.pages(s) for s in sequences if s.active or s.suspended)
                pages = self._scheduler.pages
                assert expected <= pages.num_pages - pages.num_quarantined, "one that is retracted is delayed"

    def _check_passed(self, new: DecodeSequence, sequences: list[DecodeSequence]) -> None:
        for s in sequences:
            waits = s.state is SequenceState.WAITING and s.ticket_id in self._scheduler.reserving
            if waits and s.turn(self._ageing_s) < new.turn(self._ageing_s):
                self.passed[s.request] = self.passed.get(s.request, 0) + 1
                assert self.passed[s.request] <= LOOK_PAST
