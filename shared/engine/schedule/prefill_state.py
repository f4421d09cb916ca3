"""What a prefill scheduler keeps of a prompt, and what it tells its head to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stagemesh.shared.core.commands import Command, Ints, SendPlan
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceOutput
from stagemesh.shared.fsm.sequence import SEQUENCE, SequenceEvent, SequenceState


@dataclass(slots=True)
class PrefillSequence:
    """A prompt's mutable state in this instance. `issued` counts its tokens that are in steps or done."""

    request: RequestRef
    sampling: SamplingParams
    tokens: Ints
    ticket_id: str
    group: str
    handle: int
    state: SequenceState = SequenceState.WAITING
    arrived_s: float = field(default_factory=time.monotonic)  # for people and metrics, as is `since_s`
    since_s: float = field(default_factory=time.monotonic)  # in this state
    asked: bool = False  # the decode side, for pages
    asked_s: float | None = None  # for the first time
    announced: bool = False  # to the broker, that writes are near
    filled: bool = False  # the broker has taken note
    cancelled: bool = False  # its KV is to be sent no further
    send: SendPlan | None = None
    pages: list[int] = field(default_factory=list)
    issued: int = 0
    in_flight: int = 0
    unsettled: set[int] = field(default_factory=set)  # pp_ranks that may have something of the ticket in flight

    @property
    def over(self) -> bool:
        return self.state in SEQUENCE.terminal

    @property
    def startable(self) -> bool:
        return self.filled or (not self.ticket_id and self.state is SequenceState.WAITING)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.issued

    def move(self, event: SequenceEvent) -> None:
        self.state = SEQUENCE.advance(str(self.request), self.state, event)
        self.since_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class FailedTicket:
    """A ticket that will not be used. `quiescent`: no stage has anything of it in flight, or ever will."""

    ticket_id: str
    quiescent: bool


@dataclass(slots=True)
class PrefillActions:
    """What the head must carry out now."""

    commands: list[Command] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    reserve: list[str] = field(default_factory=list)  # tickets to ask pages for
    fill: list[str] = field(default_factory=list)  # tickets whose first write is near
    fail: list[FailedTicket] = field(default_factory=list)
