"""What a scheduler tells the router about a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stagemesh.shared.core.commands import TokenLogprobs
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams


class SequenceEnd(Enum):
    """Why a sequence is over in this instance. RECOMPUTE: its KV is gone, but it is to be run again from its tokens.
    LOST: the other instance of its pair is lost, or the way there; so is it, elsewhere. FAILED: it would fail again."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"
    REJECTED = "rejected"
    RECOMPUTE = "recompute"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of a sequence. With `end` set it is the last output; `error` says why it failed."""

    request: RequestRef
    token_ids: tuple[int, ...] = ()
    end: SequenceEnd | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    cached_tokens: int = 0  # with the first token
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token, if asked for


def end_after(sampling: SamplingParams, token_id: int, count: int) -> SequenceEnd | None:
    """Whether the sequence is over once `token_id`, its `count`th new token, is known."""
    if sampling.ends(token_id, count):
        return SequenceEnd.STOP
    return SequenceEnd.LENGTH if count >= sampling.max_tokens else None
