"""The scheduler of a prefill instance: packs prompts into chunks and keeps their pages until the KV has been sent.

submit --ask for pages there--> reserved --announce the first write--> filled --> chunks... --> first token
                                                                                    `--> settled on every stage

Prompts are asked for and start in the order of `start_order`; one that has started runs on. It starts behind the pages
of its beginning that are in the prefix tree already. Its other pages are taken when it starts and given back once every
stage has nothing of its ticket in flight; those that are full of prompt stay in the tree.
A prompt without a ticket (one new token asked for) starts at once and is over with its first token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from stagemesh.shared.core.commands import (
    HANDLE,
    NO_LOGPROBS,
    Ints,
    RowLogprobs,
    SendPlan,
)
from stagemesh.shared.core.directory import InstanceLoad, StageInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.schedule.chunk_size import ChunkSize
from stagemesh.shared.engine.schedule.legs import prefill_legs
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.prefill_book import PrefillBook
from stagemesh.shared.engine.schedule.prefill_chunks import PrefillChunks
from stagemesh.shared.engine.schedule.prefill_pages import PromptPages
from stagemesh.shared.engine.schedule.prefill_queue import Lineup
from stagemesh.shared.engine.schedule.prefill_state import (
    FailedTicket,
    PrefillActions,
    PrefillSequence,
    first_output,
    start_order,
)
from stagemesh.shared.engine.schedule.stats import PrefillStats
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class PrefillScheduler:
    """Pure: the head feeds events in and carries out what `poll` returns. A point of priority is worth
    `priority_ageing_s` seconds of waiting. Without `prefix_cache` every prompt is computed whole. Without
    `min_chunk_size` no chunk is cut short."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        pp_size: int,
        chunk_size: int,
        max_sequences: int,
        reserve_ahead: int,
        min_chunk_size: int | None = None,
        run_ahead: int = 1,
        prefix_cache: bool = True,
        priority_ageing_s: float = 10.0,
    ) -> None:
        self._pages = PromptPages(num_pages, page_size, prefix_cache=prefix_cache)
        self.issuer = Issuer(self._pages.allocator)
        self.stats = PrefillStats()
        self._page_size, self._ageing_s = page_size, priority_ageing_s
        self.sequences = PrefillBook()
        self._lineup = Lineup(self._pages.look_up, reserve_ahead=reserve_ahead, chunk_size=chunk_size)
        self._chunks = PrefillChunks(
            self._pages,
            self.issuer,
            self._lineup,
            self.stats,
            ChunkSize(chunk_size, min_chunk_size or chunk_size, pp_size),
            max_sequences=max_sequences,
            pp_size=pp_size,
            run_ahead=run_ahead,
        )
        self._started = self._chunks.started
        self._actions = PrefillActions()

    # -- events --

    def conflict(self, ticket_id: str) -> str | None:
        """Why no request may come with that ticket."""
        return f"ticket_id: {ticket_id!r} is another request's" if self.knows(ticket_id) else None

    def submit(
        self,
        request: RequestRef,
        sampling: SamplingParams,
        tokens: Ints,
        ticket_id: str,
        group: str = "",
        *,
        priority: int = 0,
        waited_s: float = 0.0,
        recompute: bool = False,
        peer: InstanceRef | None = None,
    ) -> None:
        """A router sends a prompt. `ticket_id` is empty if its KV goes nowhere; `group` is the decode instance, `peer`
        this start of it; `waited_s` is since the request's arrival at its router."""
        limit = self.pages.num_pages * self._page_size
        if self.sequences.of_request(request) is not None:
            self._output(request, end=SequenceEnd.REJECTED, error="duplicate request")
            return
        if not 0 < len(tokens) <= limit:
            self._output(request, end=SequenceEnd.REJECTED, error=f"prompt: must have 1..{limit} tokens")
            return
        handle, arrived_s = self.issuer.new_handle(), time.monotonic() - waited_s
        order = start_order(arrived_s, handle, priority=priority, ageing_s=self._ageing_s, recompute=recompute)
        sequence = PrefillSequence(request, sampling, tokens, ticket_id, group, handle, arrived_s, order, peer)
        self.sequences.add(sequence)
        self._lineup.add(sequence)

    def reserved(self, ticket_id: str, pages: tuple[int, ...], targets: tuple[StageInfo, ...]) -> None:
        """The decode side has set pages aside. Too late for a prompt that is over."""
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is None or sequence.state is not SequenceState.WAITING:
            return
        sequence.send = SendPlan(ticket_id, len(sequence.tokens), pages, targets)
        sequence.move(SequenceEvent.RESERVE)
        self._lineup.reserved(sequence)
        if sequence.asked_s is not None:
            self.stats.reserve_wait.record(sequence.since_s - sequence.asked_s)

    def ask_again(self, ticket_id: str) -> None:
        """The decode side had no pages within the deadline, or it has taken them back before any write."""
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is None:
            return
        if sequence.state is SequenceState.RESERVED and not sequence.filled:
            sequence.move(SequenceEvent.UNRESERVE)
            sequence.send, sequence.announced = None, False
            self._lineup.taken_back(sequence)
        if sequence.state is SequenceState.WAITING:
            sequence.asked = False

    def filled(self, ticket_id: str) -> None:
        """The broker knows that writes may begin."""
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._lineup.filled(sequence)

    def ticket_failed(self, ticket_id: str, reason: str, end: SequenceEnd = SequenceEnd.FAILED) -> bool:
        """The other side, or the broker, does not want the KV. True if no stage has anything of it in flight."""
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is None:
            return True
        quiescent = not sequence.unsettled
        if not sequence.over:
            self._output(sequence.request, end=end, error=reason)
        self._give_up(sequence)
        return quiescent

    def abort(self, request: RequestRef) -> None:
        """The router does not want the request any more."""
        sequence = self.sequences.of_request(request)
        if sequence is not None and sequence.state is not SequenceState.ABORTED:
            if sequence.ticket_id and (not sequence.over or sequence.unsettled):
                self._actions.fail.append(FailedTicket(sequence.ticket_id, quiescent=not sequence.unsettled))
            self._give_up(sequence)

    def result(self, step_number: int, token_ids: Ints, logprobs: RowLogprobs = NO_LOGPROBS) -> None:
        """A chunk is through all stages. Sampled rows are the ends of prompts."""
        step = self.issuer.take_result(step_number)
        for at, (row, token_id) in enumerate(zip(step.rows.tolist(), token_ids.tolist(), strict=True)):
            sequence = self.sequences.of_handle(row[HANDLE])
            sequence.in_flight -= 1
            if at in logprobs and sequence.tells_prompt:
                sequence.prompt_told += logprobs[at].prompt
            if not sequence.over and token_id >= 0:
                self._actions.outputs.append(first_output(sequence, token_id, logprobs.get(at)))
                self.stats.prefill.record(time.monotonic() - sequence.since_s)
                sequence.move(SequenceEvent.FINISH)
            self._forget_if_done(sequence)

    def settled(self, ticket_id: str, pp_rank: int) -> None:
        """Stage `pp_rank` has nothing of the ticket in flight any more."""
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is not None:
            sequence.unsettled.discard(pp_rank)
            self._forget_if_done(sequence)

    def applied(self, number: int) -> None:
        self.issuer.applied(number)

    # -- instructions --

    def poll(self) -> PrefillActions:
        """Issues what can be, and returns everything to be done since the last poll."""
        self._actions.commands.extend(self._chunks.issue())
        self._lineup.ask_ahead(self._actions)
        if (rest := self.issuer.flush()) is not None:
            self._actions.commands.append(rest)
        actions, self._actions = self._actions, PrefillActions()
        return actions

    def flush_cache(self) -> int:
        """Forgets the KV that no prompt here holds. Returns how many pages are free now that were not."""
        return self._pages.tree.flush()

    # -- a sequence's way --

    def _output(
        self, request: RequestRef, token_ids: tuple[int, ...] = (), end: SequenceEnd | None = None, error: str = ""
    ) -> None:
        self._actions.outputs.append(SequenceOutput(request, token_ids, end, error))

    def _give_up(self, sequence: PrefillSequence) -> None:
        self._lineup.discard(sequence)
        if not sequence.over:
            sequence.move(SequenceEvent.ABORT)
        if sequence.unsettled and not sequence.cancelled:
            sequence.cancelled = True
            self.issuer.cancel(sequence.handle)
        self._forget_if_done(sequence)

    def _forget_if_done(self, sequence: PrefillSequence) -> None:
        if not sequence.over or sequence.in_flight or sequence.unsettled:
            return
        self.sequences.remove(sequence)
        self._actions.through.append(sequence.request)
        if self._started.pop(sequence.handle, None) is not None:
            self._pages.give_back(sequence, self.issuer)

    # -- views --

    @property
    def pages(self) -> PageAllocator:
        return self._pages.allocator

    @property
    def evicted_pages(self) -> int:
        """Of the cache, so far."""
        return self._pages.tree.evicted

    def knows(self, ticket_id: str) -> bool:
        """It is not over here, or something of it is in flight."""
        return self.sequences.of_ticket(ticket_id) is not None

    def has(self, request: RequestRef) -> bool:
        """The same of a request."""
        return self.sequences.of_request(request) is not None

    def legs(self) -> Iterator[TicketLeg]:
        """What is known here of tickets that are not over."""
        return prefill_legs(self.sequences)

    @property
    def by_state(self) -> dict[str, int]:
        return self.sequences.by_state

    @property
    def load(self) -> InstanceLoad:
        """`waiting_tokens` are those still to be computed, as far as that can be known; pages that can be evicted count
        as free."""
        running = sum(1 for s in self._started.values() if s.state is SequenceState.RUNNING)
        return InstanceLoad(len(self._lineup), running, self._pages.num_available, sum(self._chunks.expected()))

    @property
    def held(self) -> dict[str, int]:
        """What is in flight; all zero when nothing is."""
        return {
            "sequences": len(self.sequences),
            "steps": len(self.issuer.outstanding),
            "commands": self.issuer.unacknowledged,
            "pages_used": self.pages.num_used,
        }

    def check_integrity(self) -> None:
        """Raises Bug if pages and sequences do not agree."""
        self._pages.check_integrity(self._started.values(), self.issuer.num_freeing)
        in_flight = sum(len(step.rows) for step in self.issuer.outstanding.values())
        if in_flight != sum(s.in_flight for s in self.sequences):
            raise Bug(f"{in_flight} rows are out, sequences say otherwise")
        if len(self._lineup) + len(self._started) != len(self.sequences):
            raise Bug(f"{len(self.sequences)} sequences, {len(self._lineup)} wait, {len(self._started)} have started")
