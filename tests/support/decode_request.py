"""A request at a simulated decode instance, and what an undisturbed run would give."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    submitted: bool = False
    asked: bool = False  # the broker asks this side for pages
    pages: tuple[int, ...] = ()
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

    @property
    def writable(self) -> bool:
        """A writer may write to its pages, now or later."""
        return bool(self.pages) and not self.committed and not self.closed

    @property
    def holding(self) -> bool:
        """It has pages here, or steps to come. Right after a poll."""
        over = self.gone or self.end is not None
        return (
            bool(self.pages) and not over and not (self.committed and self.first_token and len(self.expected[0]) == 1)
        )

    @property
    def expected(self) -> tuple[list[int], SequenceEnd]:
        """The new tokens of an undisturbed run, the first one (which is not made here) included."""
        tokens: list[int] = []
        while True:
            tokens.append(token_at(self.ref, self.prompt_tokens + len(tokens)))
            if (end := end_after(self.sampling, tokens[-1], len(tokens))) is not None:
                return tokens, end
