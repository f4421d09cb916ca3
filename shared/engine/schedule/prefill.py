"""The scheduler of a prefill instance: packs prompts into chunks and keeps their pages until the KV has been sent.

submit --ask for pages there--> reserved --announce the first write--> filled --> chunks... --> first token
                                                                                    `--> settled on every stage

A prompt's pages here are taken when it starts and given back once every stage has nothing of its ticket in flight.
A prompt without a ticket (one new token asked for) starts at once and is over with its first token.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from stagemesh.shared.core.commands import HANDLE, NO_LOGPROBS, SAMPLE, Command, Ints, Join, RowLogprobs, SendPlan
from stagemesh.shared.core.directory import InstanceLoad, StageInfo
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator, pages_for
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput, end_after
from stagemesh.shared.engine.schedule.prefill_state import FailedTicket, PrefillActions, PrefillSequence
from stagemesh.shared.engine.schedule.stats import PrefillStats
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class PrefillScheduler:
    """Pure: the head feeds events in and carries out what `poll` returns."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        pp_size: int,
        chunk_size: int,
        max_sequences: int,
        reserve_ahead: int,
        run_ahead: int = 1,
    ) -> None:
        self.pages = PageAllocator(num_pages)
        self.issuer = Issuer(self.pages)
        self.stats = PrefillStats()
        self._page_size, self._pp_size, self._chunk_size = page_size, pp_size, chunk_size
        self._max_sequences, self._reserve_ahead = max_sequences, reserve_ahead
        self._max_steps = pp_size + run_ahead
        self._by_request: dict[RequestRef, PrefillSequence] = {}  # in order of arrival
        self._by_ticket: dict[str, PrefillSequence] = {}
        self._by_handle: dict[int, PrefillSequence] = {}
        self._actions = PrefillActions()

    # -- events --

    def submit(
        self, request: RequestRef, sampling: SamplingParams, tokens: Ints, ticket_id: str, group: str = ""
    ) -> None:
        """A router sends a prompt. `ticket_id` is empty if its KV goes nowhere; `group` is the decode instance."""
        limit = self.pages.num_pages * self._page_size
        if request in self._by_request:
            self._output(request, end=SequenceEnd.REJECTED, error="duplicate request")
        elif not 0 < len(tokens) <= limit:
            self._output(request, end=SequenceEnd.REJECTED, error=f"prompt: must have 1..{limit} tokens")
        else:
            sequence = PrefillSequence(request, sampling, tokens, ticket_id, group, self.issuer.new_handle())
            self._by_request[request] = self._by_handle[sequence.handle] = sequence
            if ticket_id:
                self._by_ticket[ticket_id] = sequence

    def reserved(self, ticket_id: str, pages: tuple[int, ...], targets: tuple[StageInfo, ...]) -> None:
        """The decode side has set pages aside. Too late for a prompt that is over."""
        sequence = self._by_ticket.get(ticket_id)
        if sequence is None or sequence.state is not SequenceState.WAITING:
            return
        sequence.send = SendPlan(ticket_id, len(sequence.tokens), pages, targets)
        sequence.move(SequenceEvent.RESERVE)
        if sequence.asked_s is not None:
            self.stats.reserve_wait.record(sequence.since_s - sequence.asked_s)

    def ask_again(self, ticket_id: str) -> None:
        """The decode side had no pages within the deadline."""
        sequence = self._by_ticket.get(ticket_id)
        if sequence is not None and sequence.state is SequenceState.WAITING:
            sequence.asked = False

    def filled(self, ticket_id: str) -> None:
        """The broker knows that writes may begin."""
        sequence = self._by_ticket.get(ticket_id)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            sequence.filled = True

    def ticket_failed(self, ticket_id: str, reason: str) -> bool:
        """The other side, or the broker, does not want the KV. True if no stage has anything of it in flight."""
        sequence = self._by_ticket.get(ticket_id)
        if sequence is None:
            return True
        quiescent = not sequence.unsettled
        if not sequence.over:
            self._output(sequence.request, end=SequenceEnd.FAILED, error=reason)
        self._give_up(sequence)
        return quiescent

    def abort(self, request: RequestRef) -> None:
        """The router does not want the request any more."""
        sequence = self._by_request.get(request)
        if sequence is not None and sequence.state is not SequenceState.ABORTED:
            if sequence.ticket_id and (not sequence.over or sequence.unsettled):
                self._actions.fail.append(FailedTicket(sequence.ticket_id, quiescent=not sequence.unsettled))
            self._give_up(sequence)

    def result(self, step_number: int, token_ids: Ints, logprobs: RowLogprobs = NO_LOGPROBS) -> None:
        """A chunk is through all stages. Sampled rows are the ends of prompts."""
        step = self.issuer.take_result(step_number)
        for at, (row, token_id) in enumerate(zip(step.rows.tolist(), token_ids.tolist(), strict=True)):
            sequence = self._by_handle[row[HANDLE]]
            sequence.in_flight -= 1
            if not sequence.over and token_id >= 0:
                end = end_after(sequence.sampling, token_id, 1)
                told = (logprobs[at],) if at in logprobs else ()
                self._actions.outputs.append(SequenceOutput(sequence.request, (token_id,), end, logprobs=told))
                self.stats.prefill.record(time.monotonic() - sequence.since_s)
                sequence.move(SequenceEvent.FINISH)
            self._forget_if_done(sequence)

    def settled(self, ticket_id: str, pp_rank: int) -> None:
        """Stage `pp_rank` has nothing of the ticket in flight any more."""
        sequence = self._by_ticket.get(ticket_id)
        if sequence is not None:
            sequence.unsettled.discard(pp_rank)
            self._forget_if_done(sequence)

    def applied(self, number: int) -> None:
        self.issuer.applied(number)

    # -- instructions --

    def poll(self) -> PrefillActions:
        """Issues what can be, and returns everything to be done since the last poll."""
        while len(self.issuer.outstanding) < self._max_steps and (command := self._next_chunk()) is not None:
            self._actions.commands.append(command)
        self._ask_ahead()
        if (rest := self.issuer.flush()) is not None:
            self._actions.commands.append(rest)
        actions, self._actions = self._actions, PrefillActions()
        return actions

    def _next_chunk(self) -> Command | None:
        """Prompts under way first, then new ones, as many tokens as a chunk holds."""
        budget, parts = self._chunk_size, []
        for sequence in self._candidates():
            if not budget:
                break
            if sequence.state is not SequenceState.RUNNING and not self._start(sequence):
                break  # no pages: nobody behind it starts before it does
            count = min(budget, sequence.remaining)
            parts.append((sequence, count))
            budget -= count
        return self._issue(parts) if parts else None

    def _candidates(self) -> Iterator[PrefillSequence]:
        live = [s for s in self._by_request.values() if not s.over]
        running = [s for s in live if s.state is SequenceState.RUNNING]
        yield from (s for s in running if s.remaining)
        room = self._max_sequences - sum(1 for s in self._by_request.values() if s.pages)
        yield from [s for s in live if s.startable and s.state is not SequenceState.RUNNING][: max(0, room)]

    def _start(self, sequence: PrefillSequence) -> bool:
        pages = self.pages.allocate(pages_for(len(sequence.tokens), self._page_size))
        if pages is None:
            return False
        sequence.pages = pages
        sequence.move(SequenceEvent.START)
        self.issuer.join(
            Join(sequence.handle, sequence.request, sequence.sampling, sequence.send, len(sequence.tokens))
        )
        self.issuer.add_pages(sequence.handle, pages)
        if sequence.send is not None:
            sequence.unsettled = set(range(self._pp_size))
        return True

    def _issue(self, parts: list[tuple[PrefillSequence, int]]) -> Command:
        rows, tokens = np.zeros((len(parts), 6), dtype=np.int64), []
        for row, (sequence, count) in zip(rows, parts, strict=True):
            last = sequence.issued + count == len(sequence.tokens)
            row[:] = (sequence.handle, sequence.issued, count, 0, 0, SAMPLE if last else 0)
            tokens.append(sequence.tokens[sequence.issued : sequence.issued + count])
            sequence.issued += count
            sequence.in_flight += 1
        self.stats.chunk_tokens.record(sum(count for _, count in parts))
        return self.issuer.issue_step(0, rows, np.concatenate(tokens))

    def _ask_ahead(self) -> None:
        """Asks for pages for the prompts that start next: two chunks' worth for each decode instance, and at least
        `reserve_ahead` of them. Announces the writes of those that have their pages and start with the next chunk."""
        ahead: dict[str, tuple[int, int]] = {}
        with_pages = 0  # tokens of the prompts before that have theirs: those that have none hold nobody up
        for sequence in self._by_request.values():
            if not sequence.ticket_id or sequence.over or sequence.state is SequenceState.RUNNING:
                continue
            count, tokens = ahead.get(sequence.group, (0, 0))
            if count >= self._reserve_ahead and tokens >= 2 * self._chunk_size:
                continue
            ahead[sequence.group] = (count + 1, tokens + len(sequence.tokens))
            if not sequence.asked:
                sequence.asked = True
                sequence.asked_s = sequence.asked_s or time.monotonic()
                self._actions.reserve.append(sequence.ticket_id)
            if sequence.state is SequenceState.RESERVED:
                if not sequence.announced and with_pages < self._chunk_size:
                    sequence.announced = True
                    self._actions.fill.append(sequence.ticket_id)
                with_pages += len(sequence.tokens)

    # -- a sequence's way --

    def _output(
        self, request: RequestRef, token_ids: tuple[int, ...] = (), end: SequenceEnd | None = None, error: str = ""
    ) -> None:
        self._actions.outputs.append(SequenceOutput(request, token_ids, end, error))

    def _give_up(self, sequence: PrefillSequence) -> None:
        if not sequence.over:
            sequence.move(SequenceEvent.ABORT)
        if sequence.unsettled and not sequence.cancelled:
            sequence.cancelled = True
            self.issuer.cancel(sequence.handle)
        self._forget_if_done(sequence)

    def _forget_if_done(self, sequence: PrefillSequence) -> None:
        if not sequence.over or sequence.in_flight or sequence.unsettled:
            return
        del self._by_request[sequence.request], self._by_handle[sequence.handle]
        self._by_ticket.pop(sequence.ticket_id, None)
        if sequence.pages:
            self.issuer.drop(sequence.handle, sequence.pages)

    # -- views --

    @property
    def sequences(self) -> Iterable[PrefillSequence]:
        """In order of arrival; also those that are over but have something in flight."""
        return self._by_request.values()

    @property
    def by_state(self) -> dict[str, int]:
        counts = Counter(sequence.state for sequence in self.sequences)
        return {state.value: counts[state] for state in SequenceState}

    @property
    def load(self) -> InstanceLoad:
        live = [s for s in self._by_request.values() if not s.over]
        running = sum(1 for s in live if s.state is SequenceState.RUNNING)
        tokens = sum(s.remaining for s in live)
        return InstanceLoad(len(live) - running, running, self.pages.num_free, tokens)

    @property
    def held(self) -> dict[str, int]:
        """What is in flight; all zero when nothing is."""
        return {
            "sequences": len(self._by_request),
            "steps": len(self.issuer.outstanding),
            "commands": self.issuer.unacknowledged,
            "pages_used": self.pages.num_used,
        }

    def check_integrity(self) -> None:
        """Raises Bug if pages and sequences do not agree."""
        self.pages.check_integrity()
        owned = sum(len(s.pages) for s in self._by_handle.values()) + self.issuer.num_freeing
        if owned != self.pages.num_used:
            raise Bug(f"{self.pages.num_used} pages are in use, but sequences own {owned}")
        in_flight = sum(len(step.rows) for step in self.issuer.outstanding.values())
        if in_flight != sum(s.in_flight for s in self._by_handle.values()):
            raise Bug(f"{in_flight} rows are out, sequences say otherwise")
