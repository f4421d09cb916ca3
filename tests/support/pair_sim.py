"""A prefill head, a decode head and a broker between them, without a network: every answer takes its time.

request --> prefill --reserve--> decode --pages, late--> prefill --KV--> commit --> decode --> tokens
              ^                                                                      |
              `------------------- recompute: host memory is full -------------------'

Steps return, messages arrive and calls time out in an order that the seed draws; time goes on a little with each. When
nothing is left that could move, a call that waits for seconds is given up, as the broker's client would; when that does
not help either, the pair stands still.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from stagemesh.shared.core.commands import FLAGS, HANDLE, SAMPLE, Command
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler

PAGE_SIZE: Final = 16
STEP_S: Final = 0.002  # of the clock, for each thing that happens
CALL_TIMEOUT_S: Final = 5.0
STANDS_STILL_S: Final = 60.0
TIMEOUT_CHANCE: Final = 0.002
DELAYS_S: Final = (0.0, 0.05, 0.3)  # of an answer with pages
MOST_EVENTS: Final = 100_000


@dataclass(slots=True)
class Request:
    prompt: list[int]
    max_tokens: int
    arrived_s: float
    made: list[int] = field(default_factory=list)
    attempt: int = 0
    done: bool = False


class PairSim:
    """`clock` is what the schedulers take for the time."""

    def __init__(self, seed: int, clock: list[float], *, num_requests: int, num_pages: int, host_pages: int) -> None:
        self._random, self._clock = random.Random(seed), clock
        self.prefill = PrefillScheduler(
            num_pages=num_pages, page_size=PAGE_SIZE, pp_size=1, chunk_size=64, max_sequences=64, reserve_ahead=2
        )
        self.decode = DecodeScheduler(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_microbatches=2,
            max_running=64,
            host_pages=host_pages,
            schedule_conservativeness=0.0,
        )
        self.requests = [self._draw() for _ in range(num_requests)]
        self.recomputed = self.timed_out = 0
        self._owners: dict[RequestRef, Request] = {}
        self._refs: dict[str, RequestRef] = {}  # by ticket
        self._states: dict[str, str] = {}  # of tickets, as the broker knows them
        self._tickets: dict[int, str] = {}  # by prefill handle
        self._prefill_steps: deque[Command] = deque()
        self._decode_steps: deque[Command] = deque()
        self._calls: dict[str, float] = {}  # reservations that are asked for, since when
        self._events: list[Callable[[], None]] = [partial(self._begin, r, recompute=False) for r in self.requests]
        self._late: list[tuple[float, Callable[[], None]]] = []
        self._answering: set[str] = set()  # tickets whose pages are on their way back

    def _draw(self) -> Request:
        length, max_tokens = self._random.randint(1, 30), self._random.randint(60, 300)
        return Request([self._random.randrange(4, 300) for _ in range(length)], max_tokens, self._clock[0])

    def run(self) -> bool:
        """Every request to its end; False if the pair stands still."""
        self._poll()
        idle_s = 0.0
        for _ in range(MOST_EVENTS):
            if all(request.done for request in self.requests):
                return True
            self._clock[0] += STEP_S
            self._let_answers_arrive()
            choices = self._choices()
            if choices:
                idle_s = 0.0
                self._random.choice(choices)()
            else:
                self._clock[0], idle_s = self._clock[0] + 1.0, idle_s + 1.0
                self._give_up(t for t, since_s in self._calls.items() if self._clock[0] - since_s > CALL_TIMEOUT_S)
            if idle_s > STANDS_STILL_S:
                return False
            if self._calls and self._random.random() < TIMEOUT_CHANCE:
                self._give_up([self._random.choice(list(self._calls))])
            self._poll()
        return False

    def _choices(self) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = [self._next_event] * min(3, len(self._events))
        if self._prefill_steps:
            choices.append(self._prefill_step)
        if self._decode_steps:
            choices.append(self._decode_step)
        return choices

    def _next_event(self) -> None:
        self._events.pop(self._random.randrange(len(self._events)))()

    def _let_answers_arrive(self) -> None:
        due = [event for at_s, event in self._late if at_s <= self._clock[0]]
        self._late = [(at_s, event) for at_s, event in self._late if at_s > self._clock[0]]
        self._events += due

    def _begin(self, request: Request, *, recompute: bool) -> None:
        """What the router does: to both heads, under a new attempt."""
        request.attempt += 1
        tokens, left = request.prompt + request.made, request.max_tokens - len(request.made)
        ref = RequestRef(str(self.requests.index(request)), request.attempt)
        ticket_id = f"t{len(self._states)}" if left > 1 else ""
        self._owners[ref] = request
        params, waited_s = SamplingParams(left, ignore_eos=True), self._clock[0] - request.arrived_s
        if ticket_id:
            self._states[ticket_id], self._refs[ticket_id] = "opened", ref
            self.decode.submit(ref, params, len(tokens), ticket_id, waited_s=waited_s, recompute=recompute)
        self.prefill.submit(
            ref,
            params,
            np.array(tokens, dtype=np.int64),
            ticket_id,
            "decode" if ticket_id else "",
            waited_s=waited_s,
            recompute=recompute,
        )

    def _poll(self) -> None:
        actions = self.prefill.poll()
        self._prefill_steps += actions.commands
        self._events += [partial(self._reserve, ticket_id) for ticket_id in actions.reserve]
        self._events += [partial(self._fill, ticket_id) for ticket_id in actions.fill]
        self._hear(actions.outputs, first=True)
        decided = self.decode.poll()
        for command in decided.commands:
            self._decode_steps.append(command)
            self._events += [partial(self.decode.copied, h, 0, restored=False) for h in command.retracts]
            self._events += [partial(self.decode.copied, h, 0, restored=True) for h in command.resumes]
        self._hear(decided.outputs, first=False)
        for admission in decided.admissions:
            if self._calls.pop(admission.ticket_id, None) is not None:
                self._answering.add(admission.ticket_id)
                answer = partial(self._answered, admission.ticket_id, admission.pages)
                self._late.append((self._clock[0] + self._random.choice(DELAYS_S), answer))
        self._events += [partial(self._unreserve, ticket_id) for ticket_id in decided.cancelled]

    def _hear(self, outputs: Iterable[SequenceOutput], *, first: bool) -> None:
        for output in outputs:
            request = self._owners[output.request]
            if output.request.attempt != request.attempt:
                continue
            assert output.end not in (SequenceEnd.FAILED, SequenceEnd.REJECTED), output
            request.made += output.token_ids
            if output.end is SequenceEnd.RECOMPUTE:
                self.recomputed += 1
                self._begin(request, recompute=True)
            elif output.end is not None:
                assert len(request.made) == request.max_tokens, request
                request.done = True
            elif first:
                self._events.append(partial(self.decode.first_token, output.request, output.token_ids[0]))

    # -- the broker --

    def _reserve(self, ticket_id: str) -> None:
        self._calls[ticket_id] = self._clock[0]
        self.decode.reserve(ticket_id, self._refs[ticket_id])

    def _answered(self, ticket_id: str, pages: tuple[int, ...]) -> None:
        self._answering.discard(ticket_id)
        if self._states[ticket_id] == "opened":
            self._states[ticket_id] = "reserved"
        self.prefill.reserved(ticket_id, pages, ())

    def _give_up(self, calls: Iterable[str]) -> None:
        for ticket_id in list(calls):
            self.timed_out += 1
            self.decode.cancel_reserve(ticket_id)
            del self._calls[ticket_id]
            self.prefill.ask_again(ticket_id)

    def _fill(self, ticket_id: str) -> None:
        if self._states[ticket_id] == "reserved":
            self._states[ticket_id] = "filling"
            self.prefill.filled(ticket_id)
        else:
            self.prefill.ask_again(ticket_id)

    def _unreserve(self, ticket_id: str) -> None:
        asked_for = ticket_id in self._calls or ticket_id in self._answering
        if self._states[ticket_id] == "reserved" and not asked_for:
            self._states[ticket_id] = "opened"
            self.decode.unreserved(ticket_id)
        else:
            self.decode.keep(ticket_id)

    # -- the stages --

    def _prefill_step(self) -> None:
        command = self._prefill_steps.popleft()
        for join in command.joins:
            self._tickets[join.handle] = join.send.ticket_id if join.send else ""
        if command.step is None:
            self.prefill.applied(command.number)
            return
        rows = command.step.rows
        sampled = (rows[:, FLAGS] & SAMPLE) != 0
        self.prefill.result(command.step.number, np.where(sampled, 7, -1))
        for handle in rows[sampled, HANDLE].tolist():
            if ticket_id := self._tickets[handle]:
                self._events.append(partial(self._written, ticket_id))

    def _written(self, ticket_id: str) -> None:
        self.prefill.settled(ticket_id, 0)
        self._states[ticket_id] = "committed"
        self.decode.commit(ticket_id)

    def _decode_step(self) -> None:
        command = self._decode_steps.popleft()
        if command.step is None:
            self.decode.applied(command.number)
        else:
            self.decode.result(command.step.number, np.full(len(command.step.rows), 5))
