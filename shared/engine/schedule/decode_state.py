"""What a decode scheduler keeps of a sequence, and what it tells its head to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stagemesh.shared.core.commands import Command
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceOutput
from stagemesh.shared.fsm.sequence import SEQUENCE, SequenceEvent, SequenceState

MAX_IN_FLIGHT = 2  # steps of one sequence: one that runs, one ahead of its data


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A request's mutable state in this instance. `issued` and `received` count new tokens, the first one included.

    A retracted sequence has its pages until every stage has copied them to host memory, then none; it has new ones from
    the moment they are being copied back, and is running once they have been.
    """

    request: RequestRef
    sampling: SamplingParams
    prompt_tokens: int
    ticket_id: str
    handle: int
    priority: int = 0
    recompute: bool = False  # an attempt before this one has lost its KV
    peer: InstanceRef | None = None  # the prefill instance
    state: SequenceState = SequenceState.WAITING
    arrived_s: float = field(default_factory=time.monotonic)  # of the request, at its router
    since_s: float = field(default_factory=time.monotonic)  # in this state; for people and metrics
    pages: list[int] = field(default_factory=list)
    asked_back: bool = False  # the broker is being asked whether anybody writes to its pages
    kept: bool = False  # somebody does
    passed: int = 0  # younger requests that were admitted because this one did not fit
    blocked_s: float | None = None  # when it did not fit for the first time
    predicted_tokens: int = 0  # all new tokens, as expected when it was admitted
    committed: bool = False
    committed_s: float = 0.0
    first_token: int | None = None
    latest: int = 0  # the last new token that is known
    issued: int = 0
    received: int = 0
    in_flight: int = 0
    joined: bool = False  # its stages have heard of it, or will with the next command
    copying: set[int] = field(default_factory=set)  # pp_ranks that copy its KV to host memory, or back
    restoring: bool = False  # back
    host_pages: int = 0  # of its copy in host memory, also while that is being made or read
    source: tuple[int, int] | None = None  # step and row that sample the next input id; None: it is `latest`

    @property
    def over(self) -> bool:
        return self.state in SEQUENCE.terminal

    @property
    def has_work(self) -> bool:
        return self.state is SequenceState.RUNNING and self.issued < self.sampling.max_tokens

    @property
    def left(self) -> int:
        """New tokens that it may still be given; the first one is not made here."""
        return self.sampling.max_tokens - max(1, self.issued)

    @property
    def position(self) -> int:
        """Where the input token of the next step lies: the latest new token. As many tokens have their KV here."""
        return self.prompt_tokens + max(1, self.issued) - 1

    @property
    def budget_tokens(self) -> int:
        """Tokens whose KV may have to be held: the last new one is never run."""
        return self.prompt_tokens + self.sampling.max_tokens - 1

    @property
    def age(self) -> tuple[float, int]:
        """Orders sequences, oldest first."""
        return self.arrived_s, self.handle

    def turn(self, ageing_s: float) -> tuple[bool, float, int]:
        """Orders requests that want pages: first those that are computed anew, then by priority, which grows by a point
        in `ageing_s`, then by age."""
        return not self.recompute, self.arrived_s - self.priority * ageing_s, self.handle

    @property
    def cancellable(self) -> bool:
        """It has pages that nobody is known to write to."""
        return self.state is SequenceState.RESERVED and not (self.committed or self.asked_back or self.kept)

    @property
    def active(self) -> bool:
        """It has pages and keeps them: it runs, is about to, or is being copied back."""
        return self.state in _ACTIVE or (self.restoring and not self.over)

    @property
    def suspended(self) -> bool:
        """It is retracted and nobody is copying it back yet."""
        return self.state is SequenceState.RETRACTED and not self.restoring

    @property
    def resumable(self) -> bool:
        """Its KV is in host memory, and all its new tokens are known."""
        return self.suspended and not self.copying and not self.in_flight

    def move(self, event: SequenceEvent) -> None:
        self.state = SEQUENCE.advance(str(self.request), self.state, event)
        self.since_s = time.monotonic()


_ACTIVE = frozenset({SequenceState.RESERVED, SequenceState.RUNNING})


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody waits for pages for the prompt of `request`, since `since_s`."""

    request: RequestRef
    since_s: float


@dataclass(frozen=True, slots=True)
class Admission:
    """Pages for the prompt of a ticket."""

    ticket_id: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first decode step of a sequence, by number."""

    request: RequestRef
    ticket_id: str
    step: int


@dataclass(slots=True)
class DecodeActions:
    """What the head must carry out now, in this order. `first_steps` are among `commands`, and of interest to traces
    only. `cancelled` are tickets whose pages are wanted back: the broker is asked whether anybody writes to them, and
    its answer is told to the scheduler by `unreserved` or `keep`."""

    commands: list[Command] = field(default_factory=list)
    first_steps: list[FirstStep] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    again_s: float | None = None  # CLOCK_MONOTONIC: to be polled again by then, whatever happens
