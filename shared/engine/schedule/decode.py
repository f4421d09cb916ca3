"""The scheduler of a decode instance: admits, forms microbatches, runs ahead, and gives pages back.

submit (router) ---.
reserve (broker) --+--> reserved --commit (broker) and first_token (router)--> running --result...--> finished

Commands run ahead of the data: a microbatch's next step is issued before the tokens of its last one are back, its rows
pointing at that step's. A sequence that turns out to have ended wastes at most that one row, which is discarded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from stagemesh.shared.core.commands import (
    EMPTY,
    FROM_STEP,
    HANDLE,
    NO_LOGPROBS,
    SAMPLE,
    Command,
    Ints,
    Join,
    RowLogprobs,
    TokenLogprobs,
)
from stagemesh.shared.core.directory import InstanceLoad
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.microbatch import Microbatches
from stagemesh.shared.engine.pages import PageAllocator, pages_for
from stagemesh.shared.engine.schedule.decode_state import MAX_IN_FLIGHT, Admission, Asked, DecodeActions, DecodeSequence
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput, end_after
from stagemesh.shared.engine.schedule.stats import DecodeStats
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class DecodeScheduler:
    """Pure: the head feeds events in and carries out what `poll` returns."""

    def __init__(
        self, *, num_pages: int, page_size: int, num_microbatches: int, max_running: int, run_ahead: int = 1
    ) -> None:
        self.pages = PageAllocator(num_pages)
        self.issuer = Issuer(self.pages)
        self.stats = DecodeStats()
        self.microbatches = Microbatches(num_microbatches)
        self._page_size, self._max_running, self._run_ahead = page_size, max_running, run_ahead
        self._by_request: dict[RequestRef, DecodeSequence] = {}
        self._by_handle: dict[int, DecodeSequence] = {}
        self._by_ticket: dict[str, DecodeSequence] = {}
        self._reserving: dict[str, Asked] = {}  # tickets that wait for pages, oldest first
        self._actions = DecodeActions()

    # -- events --

    def submit(self, request: RequestRef, sampling: SamplingParams, prompt_tokens: int, ticket_id: str) -> None:
        """A router announces a request whose KV will come with `ticket_id`."""
        if request in self._by_request:
            self._actions.outputs.append(SequenceOutput(request, end=SequenceEnd.REJECTED, error="duplicate request"))
            return
        sequence = DecodeSequence(request, sampling, prompt_tokens, ticket_id, self.issuer.new_handle())
        if self._budget(sequence) > self.pages.num_pages:
            limit = self.pages.num_pages * self._page_size
            error = f"max_tokens: prompt and new tokens need {sequence.budget_tokens} tokens, the pool holds {limit}"
            self._actions.outputs.append(SequenceOutput(request, end=SequenceEnd.REJECTED, error=error))
            return
        self._by_request[request] = self._by_ticket[ticket_id] = self._by_handle[sequence.handle] = sequence

    def reserve(self, ticket_id: str, request: RequestRef) -> None:
        """The broker asks for the pages of a prompt. Answered by an Admission, now or later."""
        self._reserving[ticket_id] = Asked(request, time.monotonic())

    def cancel_reserve(self, ticket_id: str) -> None:
        self._reserving.pop(ticket_id, None)

    def commit(self, ticket_id: str) -> bool:
        """All KV of the ticket is here. False if nobody wants it any more."""
        self.pages.prove_quiescent(ticket_id)
        sequence = self._by_ticket.get(ticket_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            return False
        sequence.committed, sequence.committed_s = True, time.monotonic()
        self._start_if_ready(sequence)
        return True

    def first_token(self, request: RequestRef, token_id: int) -> None:
        """The prefill side has sampled. Too late for a sequence that is over."""
        sequence = self._by_request.get(request)
        if sequence is not None and sequence.first_token is None:
            sequence.first_token = token_id
            sequence.issued = sequence.received = 1
            self._start_if_ready(sequence)

    def close_ticket(self, ticket_id: str, *, quiesced: bool, reason: str) -> None:
        """The ticket has failed. Its pages wait in quarantine unless nothing can write to them any more."""
        self.cancel_reserve(ticket_id)
        sequence = self._by_ticket.get(ticket_id)
        if sequence is not None and not sequence.committed:
            self._actions.outputs.append(SequenceOutput(sequence.request, end=SequenceEnd.FAILED, error=reason))
            self._end(sequence, SequenceEvent.ABORT)
        if quiesced:
            self.pages.prove_quiescent(ticket_id)

    def abort(self, request: RequestRef) -> str | None:
        """The router does not want the request any more. Returns the ticket to fail, if its KV is not all here."""
        sequence = self._by_request.get(request)
        if sequence is None or sequence.over:
            return None
        unused = None if sequence.committed else sequence.ticket_id
        self.cancel_reserve(sequence.ticket_id)
        self._end(sequence, SequenceEvent.ABORT)
        return unused

    def result(self, step_number: int, token_ids: Ints, logprobs: RowLogprobs = NO_LOGPROBS) -> None:
        """The tokens of a step, one a row."""
        step = self.issuer.take_result(step_number)
        handles = step.rows[:, HANDLE].tolist()
        for row, (handle, token_id) in enumerate(zip(handles, token_ids.tolist(), strict=True)):
            sequence = self._by_handle[handle]
            sequence.in_flight -= 1
            if not sequence.over:
                self._receive(sequence, token_id, logprobs.get(row))
                continue
            self.stats.wasted_rows += 1
            if not sequence.in_flight:
                self._forget(sequence)  # the row that it wasted was its last

    def applied(self, number: int) -> None:
        self.issuer.applied(number)

    # -- instructions --

    def poll(self) -> DecodeActions:
        """Admits and issues what can be, and returns everything to be done since the last poll."""
        self._admit()
        while (command := self._next_step()) is not None:
            self._actions.commands.append(command)
        if (rest := self.issuer.flush()) is not None:
            self._actions.commands.append(rest)
        actions, self._actions = self._actions, DecodeActions()
        return actions

    def _admit(self) -> None:
        """First come, first served, among those whose router has announced them."""
        budgeted = sum(self._budget(s) for s in self._by_handle.values() if s.pages)
        available = self.pages.num_pages - self.pages.num_quarantined - self.issuer.num_freeing - budgeted
        admitted = sum(1 for s in self._by_handle.values() if s.state in _HOLDING)
        for ticket_id, asked in list(self._reserving.items()):
            sequence = self._by_request.get(asked.request)
            if sequence is None or sequence.ticket_id != ticket_id:
                continue
            need = self._budget(sequence)
            if need > available or admitted >= self._max_running:
                return
            self._reserve(sequence)
            available, admitted = available - need, admitted + 1

    def _reserve(self, sequence: DecodeSequence) -> None:
        pages = self.pages.allocate(pages_for(sequence.prompt_tokens, self._page_size))
        if pages is None:
            raise Bug(f"{sequence.request}: admitted, but there are no pages for its prompt")
        asked = self._reserving.pop(sequence.ticket_id)
        sequence.pages = pages
        sequence.move(SequenceEvent.RESERVE)
        self.stats.reserve_wait.record(sequence.since_s - asked.since_s)
        self._actions.admissions.append(Admission(sequence.ticket_id, tuple(pages)))

    def _next_step(self) -> Command | None:
        active = sum(1 for index in range(len(self.microbatches.sizes)) if self._has_work(index))
        if len(self.issuer.outstanding) >= active + self._run_ahead:
            return None
        index = self.microbatches.next_turn(self._has_work)
        if index is None:
            return None
        self.microbatches.rebalance(index, lambda handle: self._by_handle[handle].in_flight < MAX_IN_FLIGHT)
        rows = [s for s in self._members(index) if s.has_work and s.in_flight < MAX_IN_FLIGHT]
        if not rows:
            return None  # its turn, but both of its steps are out: the next result brings us back here
        self.microbatches.take_turn(index)
        return self._issue(index, rows)

    def _issue(self, index: int, sequences: list[DecodeSequence]) -> Command:
        rows = np.zeros((len(sequences), 6), dtype=np.int64)
        tokens: list[int] = []
        for row, sequence in zip(rows, sequences, strict=True):
            self._grow(sequence)
            source, flags = sequence.source or (0, 0), SAMPLE | (FROM_STEP if sequence.source else 0)
            row[:] = (sequence.handle, sequence.position, 1, *source, flags)
            if sequence.source is None:
                assert sequence.first_token is not None
                tokens.append(sequence.first_token)
                self.stats.first_step_wait.record(time.monotonic() - sequence.committed_s)
        self.stats.step_rows.record(len(sequences))
        number = self.issuer.steps_issued + 1
        for at, sequence in enumerate(sequences):
            sequence.source = (number, at)
            sequence.issued += 1
            sequence.in_flight += 1
        return self.issuer.issue_step(index, rows, np.array(tokens, dtype=np.int64) if tokens else EMPTY)

    def _grow(self, sequence: DecodeSequence) -> None:
        """A page for the token at the next position, if it begins one. Within the budget, so there is one."""
        missing = pages_for(sequence.position + 1, self._page_size) - len(sequence.pages)
        pages = self.pages.allocate(missing) if missing > 0 else []
        if pages is None:
            raise Bug(f"{sequence.request}: its budget promised a page that is not there")
        sequence.pages += pages
        self.issuer.add_pages(sequence.handle, pages)

    # -- a sequence's way --

    def _start_if_ready(self, sequence: DecodeSequence) -> None:
        if not sequence.committed or sequence.first_token is None or sequence.over:
            return
        sequence.move(SequenceEvent.START)
        self.issuer.join(Join(sequence.handle, sequence.request, sequence.sampling, None, sequence.prompt_tokens))
        self.issuer.add_pages(sequence.handle, sequence.pages)
        self.microbatches.join(sequence.handle)
        if end_after(sequence.sampling, sequence.first_token, 1) is not None:
            self._end(sequence, SequenceEvent.FINISH)

    def _receive(self, sequence: DecodeSequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        sequence.received += 1
        self.stats.decoded_tokens += 1
        end = end_after(sequence.sampling, token_id, sequence.received)
        told = () if logprobs is None else (logprobs,)
        self._actions.outputs.append(SequenceOutput(sequence.request, (token_id,), end, logprobs=told))
        if end is not None:
            self._end(sequence, SequenceEvent.FINISH)

    def _end(self, sequence: DecodeSequence, event: SequenceEvent) -> None:
        joined = sequence.state is SequenceState.RUNNING
        sequence.move(event)
        if joined:
            self.microbatches.leave(sequence.handle)
        elif sequence.pages and not sequence.committed:
            self.pages.quarantine(sequence.ticket_id, sequence.pages)
            sequence.pages = []
        elif sequence.pages:
            self.pages.release(sequence.pages)  # no stage has heard of them
            sequence.pages = []
        if not sequence.in_flight:
            self._forget(sequence)

    def _forget(self, sequence: DecodeSequence) -> None:
        del self._by_request[sequence.request], self._by_ticket[sequence.ticket_id], self._by_handle[sequence.handle]
        if sequence.pages:
            self.issuer.drop(sequence.handle, sequence.pages)

    # -- views --

    def _budget(self, sequence: DecodeSequence) -> int:
        return pages_for(sequence.budget_tokens, self._page_size)

    def _members(self, index: int) -> list[DecodeSequence]:
        return [self._by_handle[handle] for handle in self.microbatches.members(index)]

    def _has_work(self, index: int) -> bool:
        return any(sequence.has_work for sequence in self._members(index))

    @property
    def oldest_source(self) -> int:
        """No step to come, and none that is out, takes its input from a step before this one."""
        sources = [s.source[0] for s in self._by_handle.values() if s.source]
        out = [number for step in self.issuer.outstanding.values() for number in step.source_steps]
        return min(sources + out, default=self.issuer.steps_issued + 1)

    @property
    def sequences(self) -> Iterable[DecodeSequence]:
        """In order of arrival; also those that are over but have something in flight."""
        return self._by_handle.values()

    @property
    def reserving(self) -> Mapping[str, Asked]:
        """Tickets that wait for pages, oldest first."""
        return self._reserving

    @property
    def by_state(self) -> dict[str, int]:
        counts = Counter(sequence.state for sequence in self.sequences)
        return {state.value: counts[state] for state in SequenceState}

    @property
    def load(self) -> InstanceLoad:
        running = sum(1 for s in self._by_handle.values() if s.state is SequenceState.RUNNING)
        waiting = sum(1 for s in self._by_handle.values() if not s.over) - running
        return InstanceLoad(waiting, running, self.pages.num_free)

    @property
    def held(self) -> dict[str, int]:
        """What is in flight; all zero when nothing is."""
        return {
            "sequences": len(self._by_handle),
            "reserving": len(self._reserving),
            "steps": len(self.issuer.outstanding),
            "commands": self.issuer.unacknowledged,
            "pages_used": self.pages.num_used,
            "pages_quarantined": self.pages.num_quarantined,
        }

    def check_integrity(self) -> None:
        """Raises Bug if pages, microbatches and sequences do not agree."""
        self.pages.check_integrity()
        self.microbatches.check_integrity()
        owned = sum(len(s.pages) for s in self._by_handle.values()) + self.issuer.num_freeing
        if owned != self.pages.num_used:
            raise Bug(f"{self.pages.num_used} pages are in use, but sequences own {owned}")
        in_flight = sum(len(step.rows) for step in self.issuer.outstanding.values())
        if in_flight != sum(s.in_flight for s in self._by_handle.values()):
            raise Bug(f"{in_flight} rows are out, sequences say otherwise")


_HOLDING = frozenset({SequenceState.RESERVED, SequenceState.RUNNING})
