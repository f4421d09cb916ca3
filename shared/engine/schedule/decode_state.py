"""What a decode scheduler keeps of a sequence, and what it tells its head to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stagemesh.shared.core.commands import Command
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceOutput
from stagemesh.shared.fsm.sequence import SEQUENCE, SequenceEvent, SequenceState

MAX_IN_FLIGHT = 2  # steps of one sequence: one that runs, one ahead of its data


@dataclass(slots=True)
class DecodeSequence:
    """A request's mutable state in this instance. `issued` and `received` count new tokens, the first one included."""

    request: RequestRef
    sampling: SamplingParams
    prompt_tokens: int
    ticket_id: str
    handle: int
    state: SequenceState = SequenceState.WAITING
    arrived_s: float = field(default_factory=time.monotonic)  # for people and metrics, as is `since_s`
    since_s: float = field(default_factory=time.monotonic)  # in this state
    pages: list[int] = field(default_factory=list)
    committed: bool = False
    committed_s: float = 0.0
    first_token: int | None = None
    issued: int = 0
    received: int = 0
    in_flight: int = 0
    source: tuple[int, int] | None = None  # step and row that sample the next input id; None: it is `first_token`

    @property
    def over(self) -> bool:
        return self.state in SEQUENCE.terminal

    @property
    def has_work(self) -> bool:
        return self.state is SequenceState.RUNNING and self.issued < self.sampling.max_tokens

    @property
    def position(self) -> int:
        """Where the input token of the next step lies: the latest new token."""
        return self.prompt_tokens + self.issued - 1

    @property
    def budget_tokens(self) -> int:
        """Tokens whose KV may have to be held: the last new one is never run."""
        return self.prompt_tokens + self.sampling.max_tokens - 1

    def move(self, event: SequenceEvent) -> None:
        self.state = SEQUENCE.advance(str(self.request), self.state, event)
        self.since_s = time.monotonic()


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


@dataclass(slots=True)
class DecodeActions:
    """What the head must carry out now, in this order."""

    commands: list[Command] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
