"""A prompt at a simulated prefill instance, and what each stage has to send of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagemesh.shared.core.commands import SendPlan
from stagemesh.shared.core.directory import RegionKey, StageInfo
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.output import SequenceOutput

TARGETS = (StageInfo(0, LayerRange(0, 1), "there", RegionKey("there", 0, 1)),)


@dataclass(slots=True, eq=False)
class SimPrompt:
    """A prompt, its ticket, and what has become of both. Without a ticket its KV goes nowhere."""

    ref: RequestRef
    ticket_id: str
    num_tokens: int
    sampling: SamplingParams
    group: str
    asks: int = 0  # for pages, unanswered
    plan: SendPlan | None = None
    announced: bool = False
    filled: bool = False
    handle: int | None = None  # once it has joined the stages
    issued: int = 0
    unsettled: set[int] = field(default_factory=set)  # ranks that the head has not heard to have settled
    dropped: bool = False
    sampled: bool = False  # the head has its first token
    gone: bool = False  # aborted, failed or never taken
    failed: bool = False  # its ticket is
    aborted: bool = False
    silent: bool = False  # nothing more may be said about it
    outputs: list[SequenceOutput] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.gone or self.sampled


@dataclass(slots=True, eq=False)
class Outgoing:
    """What one stage has to send of one prompt."""

    prompt: SimPrompt
    unwritten: list[int] = field(default_factory=list)  # pages of the prompt that are complete and not yet sent
    num_complete: int = 0
    over: bool = False  # whole or cancelled: it settles once nothing is in flight

    def progressed(self, tokens_done: int, page_size: int) -> None:
        """A chunk is in the pool: pages that are complete may leave."""
        self.over = tokens_done == self.prompt.num_tokens
        complete = pages_for(tokens_done, page_size) if self.over else tokens_done // page_size
        self.unwritten += range(self.num_complete, complete)
        self.num_complete = complete
