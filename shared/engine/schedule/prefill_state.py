"""What a prefill scheduler keeps of a prompt, and what it tells its head to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Final

from stagemesh.shared.core.commands import Command, Ints, SendPlan, TokenLogprobs
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.prefix import PrefixNode
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput, end_after
from stagemesh.shared.fsm.sequence import SEQUENCE, SequenceEvent, SequenceState

MAX_TOLD: Final = 256
"""Tokens of a chunk that all tell their log probabilities: each needs logits, a row as long as the vocabulary."""
StartOrder = tuple[bool, float, int]


def start_order(arrived_s: float, handle: int, *, priority: int, ageing_s: float, recompute: bool) -> StartOrder:
    """Recomputed prompts first; then by priority + waited / ageing_s, higher first; then by age. As all waiting prompts
    age alike, that sum orders them as `arrived_s - priority * ageing_s` does, which stays what it is."""
    return (not recompute, arrived_s - priority * ageing_s, handle)


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """A prompt's mutable state in this instance. `issued` counts its tokens that are in steps or done, the first
    `cached` of which had their KV here before it started. `path` are the pages of the prefix tree that it holds: its
    own ones, or those of a prompt that was first. Prompts start in ascending `order`."""

    request: RequestRef
    sampling: SamplingParams
    tokens: Ints
    ticket_id: str
    group: str
    handle: int
    arrived_s: float  # of the request at its router
    order: StartOrder
    peer: InstanceRef | None = None  # the decode instance
    state: SequenceState = SequenceState.WAITING
    since_s: float = field(default_factory=time.monotonic)  # in this state; for people and metrics
    asked: bool = False  # the decode side, for pages
    asked_s: float | None = None  # for the first time
    announced: bool = False  # to the broker, that writes are near
    filled: bool = False  # the broker has taken note
    cancelled: bool = False  # its KV is to be sent no further
    send: SendPlan | None = None
    expected_cached: int = 0  # tokens, if it started now: an estimate of when it was last looked up
    cached: int = 0
    keys: list[bytes] = field(default_factory=list)  # of its full pages; from its start on, as are pages and path
    pages: list[int] = field(default_factory=list)
    path: list[PrefixNode] = field(default_factory=list)
    prompt_told: list[TokenLogprobs] = field(default_factory=list)
    issued: int = 0
    in_flight: int = 0
    unsettled: set[int] = field(default_factory=set)  # pp_ranks that may have something of the ticket in flight

    @property
    def over(self) -> bool:
        return self.state in SEQUENCE.terminal

    @property
    def tells_prompt(self) -> bool:
        """The log probabilities of its own tokens are asked for: it is computed whole."""
        return self.sampling.prompt_logprobs is not None

    @property
    def startable(self) -> bool:
        return self.filled or (not self.ticket_id and self.state is SequenceState.WAITING)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.issued

    @property
    def expected(self) -> int:
        """Tokens that it has to compute, if what was cached when it was last looked up still is when it starts."""
        return self.remaining - (0 if self.pages else self.expected_cached)

    @property
    def private_pages(self) -> list[int]:
        """Its pages that the prefix tree knows nothing of."""
        known = len(self.path)
        return [page for page, node in zip(self.pages, self.path, strict=False) if page != node.page] + self.pages[
            known:
        ]

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
    through: list[RequestRef] = field(default_factory=list)  # nothing of them is left here, once `outputs` are told


def first_output(sequence: PrefillSequence, token_id: int, said: TokenLogprobs | None) -> SequenceOutput:
    """Its first token, and all that comes with it; or why there is none."""
    if said is not None and said.failure:
        return SequenceOutput(sequence.request, end=SequenceEnd.REJECTED, error=said.failure)
    is_of_prompt = sequence.tells_prompt and sequence.sampling.logprobs is None
    told = () if said is None or is_of_prompt else (replace(said, prompt=()),)
    return SequenceOutput(
        sequence.request,
        (token_id,),
        end_after(sequence.sampling, token_id, 1),
        logprobs=told,
        cached_tokens=sequence.cached,
        prompt_logprobs=tuple(sequence.prompt_told),
    )
