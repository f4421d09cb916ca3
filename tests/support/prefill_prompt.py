"""A prompt at a simulated prefill instance, and what each stage has to send of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagemesh.shared.core.commands import SendPlan
from stagemesh.shared.core.directory import RegionKey, StageInfo
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceOutput

Family = tuple[str, int]
"""Whose first tokens a prompt has, and how many of them."""

TARGETS = (StageInfo(0, LayerRange(0, 1), "there", RegionKey("there", 0, 1)),)


def ref_of(number: int, family: Family | None) -> RequestRef:
    """The name by which `token_at` knows its tokens."""
    name = f"r{number}" if family is None else f"r{number}~{family[0]}~{family[1]}"
    return RequestRef(name, number % 2)


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
    cached: int | None = None  # tokens that were not computed for it, once it has started
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
