"""Live requests of a router whose attempts run nowhere: a test says what their heads answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagemesh.services.router.attempt import Attempt, Owner, Wanted
from stagemesh.services.router.request import LiveRequest
from stagemesh.services.router.turns import Turns
from stagemesh.shared.core.commands import TokenLogprobs
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput


class Attempts:
    """Starts them and keeps them, in order. Numbers begin with 1."""

    def __init__(self) -> None:
        self.all: list[Attempt] = []

    def __call__(self, wanted: Wanted, owner: Owner) -> Attempt:
        attempt = Attempt(RequestRef(wanted.request_id, len(self.all) + 1), wanted, owner)
        self.all.append(attempt)
        return attempt

    @property
    def last(self) -> Attempt:
        return self.all[-1]

    def say(
        self,
        *token_ids: int,
        end: SequenceEnd | None = None,
        error: str = "",
        logprobs: Sequence[TokenLogprobs] = (),
        cached_tokens: int = 0,
        attempt: Attempt | None = None,
    ) -> None:
        """A head of the last attempt, or of `attempt`, has an output."""
        attempt = attempt or self.last
        attempt.on_output(SequenceOutput(attempt.ref, token_ids, end, error, tuple(logprobs), cached_tokens))


def begun(
    prompt: Sequence[int] = (1,),
    sampling: SamplingParams | None = None,
    *,
    name: str = "r",
    turns: Turns | None = None,
    on_first_token: Callable[[], None] = lambda: None,
) -> tuple[LiveRequest, Attempts]:
    """A request whose first attempt has been started."""
    attempts = Attempts()
    wanted = Wanted(name, sampling or SamplingParams(max_tokens=9), list(prompt))
    live = LiveRequest(wanted, attempts, turns or Turns(), on_first_token)
    live.begin()
    return live, attempts
