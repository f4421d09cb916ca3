"""The scheduler of a decode instance: admits, forms microbatches, runs ahead, and makes room when pages run out.

submit (router) ---.
reserve (broker) --+--> reserved --commit (broker) and first_token (router)--> running --result...--> finished
                           |                                                   |    ^
                           `--taken back, asked for again                      v    |
                                                                             retracted

Commands run ahead of the data: a microbatch's next step is issued before the tokens of its last one are back, its rows
pointing at that step's. A sequence that turns out to have ended wastes at most that one row, which is discarded.

Nobody is promised the pages that it grows into: `admission` expects, `pressure` relieves. The KV of a retracted
sequence is copied to host memory, or, where there is no room for it either, the sequence ends here and its router runs
it again from its tokens. Of those that run, the oldest is never retracted, and the last pages are kept for it: so there
is progress whatever happens. A retracted sequence is resumed before anybody younger is, and before anybody new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from stagemesh.shared.core.commands import HANDLE, NO_LOGPROBS, Ints, RowLogprobs
from stagemesh.shared.core.directory import InstanceLoad
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.decode_core import DecodeCore
from stagemesh.shared.engine.schedule.decode_memory import DecodeMemory
from stagemesh.shared.engine.schedule.decode_settings import DecodeSettings, StepRoom
from stagemesh.shared.engine.schedule.decode_state import Asked, DecodeActions, DecodeSequence
from stagemesh.shared.engine.schedule.decode_steps import DecodeSteps
from stagemesh.shared.engine.schedule.late_issue import LateIssue
from stagemesh.shared.engine.schedule.legs import decode_legs
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.yielding import YieldPolicy
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class DecodeScheduler:
    """Pure: the head feeds events in and carries out what `poll` returns."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_microbatches: int,
        max_running: int,
        run_ahead: int = 1,
        pp_size: int = 1,
        host_pages: int = 0,
        schedule_conservativeness: float = 1.0,
        priority_ageing_s: float = 10.0,
        yield_s: float = 0.0,
        late_issue: bool = False,
        room: StepRoom | None = None,
    ) -> None:
        """`yield_s` is how long steps are held at most for prompts that are being computed; with `late_issue` a step
        that runs ahead is issued a part of a step later while there are some, see there. `host_pages` is how many
        pages of retracted sequences fit into the host memory of every stage. Waiting for `priority_ageing_s` is worth
        one point of priority. `room` bounds what may be set later; None: nothing does. Raises Rejected for a
        conservativeness out of its limits."""
        self._core = DecodeCore(num_pages=num_pages, page_size=page_size, num_microbatches=num_microbatches)
        self._core.growth.set_conservativeness(schedule_conservativeness)
        self._memory = DecodeMemory(
            self._core,
            max_running=max_running,
            pp_size=pp_size,
            host_pages=host_pages,
            priority_ageing_s=priority_ageing_s,
        )
        self._steps = DecodeSteps(self._core, run_ahead=run_ahead)
        self._yielding = YieldPolicy(yield_s)
        self._late = LateIssue(enabled=late_issue, depth=num_microbatches + run_ahead)
        self.pages, self.issuer, self.stats = self._core.pages, self._core.issuer, self._core.stats
        self.growth = self._core.growth
        self.microbatches, self.sequences = self._core.microbatches, self._core.sequences
        self.settings = DecodeSettings(self._core, self._memory, pp_size=pp_size, run_ahead=run_ahead, room=room)

    # -- events --

    def conflict(self, ticket_id: str) -> str | None:
        """Why no request may come with that ticket."""
        if not ticket_id:
            return "ticket_id: must name the ticket that the KV comes with"
        return None if self.sequences.of_ticket(ticket_id) is None else f"ticket_id: {ticket_id!r} is another request's"

    def submit(
        self,
        request: RequestRef,
        sampling: SamplingParams,
        prompt_tokens: int,
        ticket_id: str,
        *,
        priority: int = 0,
        waited_s: float = 0.0,
        recompute: bool = False,
        peer: InstanceRef | None = None,
    ) -> None:
        """A router announces a request whose KV will come from `peer` with `ticket_id`, `waited_s` after it has arrived
        there."""
        if self.sequences.of_request(request) is not None:
            self._core.output(SequenceOutput(request, end=SequenceEnd.REJECTED, error="duplicate request"))
            return
        sequence = DecodeSequence(
            request, sampling, prompt_tokens, ticket_id, self.issuer.new_handle(), priority, recompute, peer
        )
        sequence.arrived_s -= waited_s
        if pages_for(sequence.budget_tokens, self._core.page_size) > self.pages.num_pages:
            limit = self.pages.num_pages * self._core.page_size
            error = f"max_tokens: prompt and new tokens need {sequence.budget_tokens} tokens, the pool holds {limit}"
            self._core.output(SequenceOutput(request, end=SequenceEnd.REJECTED, error=error))
            return
        self.sequences.add(sequence)

    def reserve(self, ticket_id: str, request: RequestRef) -> None:
        """The broker asks for the pages of a prompt. Answered by an Admission, now or later; asked again for pages that
        it has been given, by the same ones."""
        self._memory.reserving[ticket_id] = Asked(request, time.monotonic())

    def cancel_reserve(self, ticket_id: str) -> None:
        self._memory.reserving.pop(ticket_id, None)

    def unreserved(self, ticket_id: str) -> None:
        """Nobody writes to the pages that were asked back, or will before it has asked for others: they are free."""
        self._memory.unreserved(ticket_id)

    def keep(self, ticket_id: str) -> None:
        """The pages that were asked back may be written to, or it is not known whether they may."""
        self._memory.keep(ticket_id)

    def reserved_pages(self, ticket_id: str) -> tuple[int, ...]:
        """Where the KV of the ticket's prompt is to arrive; nothing once that has ended."""
        sequence = self.sequences.of_ticket(ticket_id)
        reserved = sequence is not None and sequence.state is SequenceState.RESERVED
        return tuple(sequence.pages) if sequence is not None and reserved else ()

    def commit(self, ticket_id: str) -> bool:
        """All KV of the ticket is here. False if nobody wants it any more."""
        self._core.prove_quiescent(ticket_id)
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            return False
        sequence.committed, sequence.committed_s, sequence.asked_back = True, time.monotonic(), False
        self._core.start_if_ready(sequence)
        return True

    def first_token(self, request: RequestRef, token_id: int) -> None:
        """The prefill side has sampled. Too late for a sequence that is over."""
        sequence = self.sequences.of_request(request)
        if sequence is not None and sequence.first_token is None:
            sequence.first_token = sequence.latest = token_id
            sequence.issued = sequence.received = 1
            self._core.start_if_ready(sequence)

    def close_ticket(
        self, ticket_id: str, *, quiesced: bool, reason: str, end: SequenceEnd = SequenceEnd.FAILED
    ) -> None:
        """The ticket has failed. Its pages wait in quarantine unless nothing can write to them any more."""
        self.cancel_reserve(ticket_id)
        sequence = self.sequences.of_ticket(ticket_id)
        if sequence is not None and not sequence.committed:
            self._core.output(SequenceOutput(sequence.request, end=end, error=reason))
            self._core.end(sequence, SequenceEvent.ABORT)
        if quiesced:
            self._core.prove_quiescent(ticket_id)

    def abort(self, request: RequestRef) -> str | None:
        """The router does not want the request any more. Returns the ticket to fail, if its KV is not all here."""
        sequence = self.sequences.of_request(request)
        if sequence is None or sequence.over:
            return None
        unused = None if sequence.committed else sequence.ticket_id
        self.cancel_reserve(sequence.ticket_id)
        self._core.end(sequence, SequenceEvent.ABORT)
        return unused

    def result(self, step_number: int, token_ids: Ints, logprobs: RowLogprobs = NO_LOGPROBS) -> None:
        """The tokens of a step, one a row."""
        self._late.result(time.monotonic(), is_full=self._steps.is_full)
        step = self.issuer.take_result(step_number)
        handles = step.rows[:, HANDLE].tolist()
        for row, (handle, token_id) in enumerate(zip(handles, token_ids.tolist(), strict=True)):
            sequence = self.sequences.of_handle(handle)
            sequence.in_flight -= 1
            if sequence.over:
                self.stats.wasted_rows += 1
                self._core.forget_if_done(sequence)
            else:
                self._core.receive(sequence, token_id, logprobs.get(row))

    def launched(self, took_s: float) -> None:
        """The first stage had a step on its device so long after it was issued."""
        self._late.launched(took_s)

    def copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        """Stage `pp_rank` has copied the sequence's KV to host memory or, `restored`, back into its pages. Raises Bug
        if it was not to."""
        self._memory.copied(handle, pp_rank, restored=restored)

    def applied(self, number: int) -> None:
        self.issuer.applied(number)

    # -- instructions --

    def poll(self) -> DecodeActions:
        """Makes room, resumes, admits and issues what can be, and returns everything to be done since the last poll."""
        self._memory.relieve()
        self._memory.let_in()
        filling = any(s.state is SequenceState.RESERVED and not s.committed for s in self.sequences)
        again_s = self._issue(filling=filling)
        self._core.flush()
        actions, self._core.actions = self._core.actions, DecodeActions()
        actions.again_s = again_s
        return actions

    def _issue(self, *, filling: bool) -> float | None:
        """When to look again, if steps are held."""
        now_s = time.monotonic()
        if self._yielding.holds(now_s, filling=filling):
            return self._yielding.again_s
        due_s = self._late.wait_until(now_s) if filling else None
        return None if self._steps.issue(self._memory.oldest, is_due=due_s is None) else due_s

    # -- views --

    @property
    def schedule_conservativeness(self) -> float:
        return self.growth.conservativeness

    @schedule_conservativeness.setter
    def schedule_conservativeness(self, value: float) -> None:
        """Takes effect with the next poll. Raises Rejected outside the limits."""
        self.growth.set_conservativeness(value)

    @property
    def oldest_source(self) -> int:
        """No step to come, and none that is out, takes its input from a step before this one."""
        sources = [s.source[0] for s in self.sequences if s.source]
        out = [number for step in self.issuer.outstanding.values() for number in step.source_steps]
        return min(sources + out, default=self.issuer.steps_issued + 1)

    @property
    def reserving(self) -> Mapping[str, Asked]:
        """Tickets that wait for pages, oldest first."""
        return self._memory.reserving

    def legs(self) -> Iterator[TicketLeg]:
        """What is known here of tickets that are not over, those with pages in quarantine included."""
        yield from decode_legs(self.sequences)
        yield from self._core.quarantined.values()

    @property
    def by_state(self) -> dict[str, int]:
        return self.sequences.by_state

    @property
    def slots_free(self) -> int:
        """How many more may be admitted; retracted sequences keep their places."""
        return self._memory.max_running - sum(1 for s in self.sequences if s.active or s.suspended)

    @property
    def host_pages(self) -> int:
        """How many pages of retracted sequences fit into host memory."""
        return self._memory.host_pages

    @property
    def host_pages_used(self) -> int:
        return self.sequences.host_pages

    @property
    def load(self) -> InstanceLoad:
        running = sum(1 for s in self.sequences if s.state is SequenceState.RUNNING)
        waiting = sum(1 for s in self.sequences if not s.over) - running
        retractions = self.stats.retractions + self.stats.recomputed
        return InstanceLoad(waiting, running, self.pages.num_free, retractions=retractions)

    @property
    def held(self) -> dict[str, int]:
        """What is in flight; all zero when nothing is."""
        return {
            "sequences": len(self.sequences),
            "reserving": len(self._memory.reserving),
            "steps": len(self.issuer.outstanding),
            "commands": self.issuer.unacknowledged,
            "copies": sum(1 for s in self.sequences if s.copying),
            "host_pages": self.host_pages_used,
            "pages_used": self.pages.num_used,
            "pages_quarantined": self.pages.num_quarantined,
        }

    def check_integrity(self) -> None:
        """Raises Bug if pages, microbatches and sequences do not agree."""
        self.pages.check_integrity()
        self.microbatches.check_integrity()
        self.sequences.check_integrity(self.pages, self.issuer, self.microbatches)
        if self.host_pages_used > self.host_pages:
            raise Bug(f"{self.host_pages_used} pages are in host memory, there is room for {self.host_pages}")
