"""A request at a simulated decode instance, and what an undisturbed run would give."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, end_after
from tests.support.sim_stages import token_at


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request, its ticket, and what has become of both."""

    ref: RequestRef
    ticket_id: str
    prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    recompute: bool = False
    arrived_s: float = field(default_factory=time.monotonic)
    submitted: bool = False
    asked: bool = False  # the broker asks this side for pages, and has no answer
    pages: tuple[int, ...] = ()
    in_question: bool = False  # this side wants them back
    verdict: bool | None = None  # the broker's, on the way to this side
    to_write: list[tuple[int, int]] = field(default_factory=list)  # (stage, page of the prompt) that may still land
    filling: bool = False
    committed: bool = False
    closed: bool = False  # this side was told, and nothing of the ticket is in flight any more
    failed: bool = False  # this side was told
    gone: bool = False  # by that, or by an abort, or it was never taken
    first_token: bool = False
    aborted: bool = False
    silent: bool = False  # nothing more may be said about it
    tokens: list[int] = field(default_factory=list)
    end: SequenceEnd | None = None
    calm_run: tuple[list[int], SequenceEnd] | None = None  # once it has been asked for

    @property
    def writable(self) -> bool:
        """A writer may write to its pages, now or later."""
        return bool(self.pages) and not self.committed and not self.closed

    @property
    def expected(self) -> tuple[list[int], SequenceEnd]:
        """The new tokens of an undisturbed run, the first one (which is not made here) included."""
        if self.calm_run is None:
            tokens, end = list[int](), None
            while end is None:
                tokens.append(token_at(self.ref, self.prompt_tokens + len(tokens)))
                end = end_after(self.sampling, tokens[-1], len(tokens))
            self.calm_run = tokens, end
        return self.calm_run

    def continuation(self, ticket_id: str) -> SimRequest | None:
        """What its router runs when its KV is lost: the same text from where it was. None if a prefill instance can do
        what is left."""
        made = 1 + len(self.tokens)
        left = self.sampling.max_tokens - made
        ref = self.ref if "~" in self.ref.request_id else RequestRef(f"{self.ref.request_id}~{self.ref}~1000000", 0)
        sampling = replace(self.sampling, max_tokens=left, min_tokens=max(0, self.sampling.min_tokens - made))
        again = SimRequest(
            RequestRef(ref.request_id, ref.attempt + 1),
            ticket_id,
            self.prompt_tokens + made,
            sampling,
            self.priority,
            recompute=True,
            arrived_s=self.arrived_s,
        )
        return again if left > 1 else None
