"""A live request in the router, from its client's side: tokens in from the attempt that runs, out in order.

begin --> an attempt --outputs--> an ending, or an error
             |    ^
             `----'  an attempt that ends early, or is lost, runs on elsewhere; its client sees a pause

An abort, a deadline or a disconnect may come anywhere: both heads are told, once, by `release`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat

from stagemesh.services.router.answer import FreshToken
from stagemesh.services.router.attempt import Attempt, Phase, Start, Wanted
from stagemesh.services.router.turns import Turns
from stagemesh.shared.core.commands import TokenLogprobs
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import Rejected, Retryable


@dataclass(frozen=True, slots=True)
class Ending:
    """Why it is over: STOP or LENGTH; None is an abort. `stop` is the stop string that matched, if one did."""

    end: SequenceEnd | None
    stop: str = ""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Takes the outputs of its attempts and gives them to one client. `wanted` is what the client asked for."""

    wanted: Wanted
    start: Start
    turns: Turns = field(default_factory=Turns)  # the router's, which all its requests share
    on_first_token: Callable[[], None] = lambda: None
    max_attempts: int = 3  # those for want of memory aside
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None  # since the start
    cached_tokens: int = 0  # of the prompt, as the client sent it
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # once the first token is there, if asked for
    completion_tokens: int = 0
    num_attempts: int = 0
    recomputed_tokens: int = 0  # whose KV was made before
    _lost_attempts: int = 0
    _last_loss: str = ""
    _made: array[int] = field(default_factory=lambda: array("q"))
    _fresh: list[FreshToken] = field(default_factory=list)
    _ending: Ending | None = None
    _error: Exception | None = None
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _asks: bool = False  # its client waits for what comes
    _attempt: Attempt | None = None

    def begin(self) -> None:
        """Sends it off."""
        self._begin(self.wanted)

    def _begin(self, wanted: Wanted) -> None:
        self.num_attempts += 1
        self._attempt = self.start(wanted, self)

    # -- outputs in --

    def on_output(self, attempt: Attempt, output: SequenceOutput) -> None:
        """Of the attempt that runs; nothing counts any more once the request has ended."""
        if attempt is not self._attempt or self._is_over:
            return
        match output.end:
            case SequenceEnd.FAILED:
                self._error = Retryable(output.error)
            case SequenceEnd.REJECTED:
                name, _, message = output.error.partition(": ")
                self._error = Rejected(name, message or output.error)
            case SequenceEnd.RECOMPUTE:
                self._take(output)
                self._run_on(recompute=True, lost_on=self._lost_on)
            case end:
                self._take(output)
                self._ending = None if end is None else Ending(end)
        self._on_news()

    def on_failure(self, attempt: Attempt, error: Exception) -> None:
        """The attempt could not be sent off."""
        if attempt is self._attempt:
            is_consequence = self._last_loss and isinstance(error, Retryable)
            self.fail(Retryable(f"{self._last_loss}; {error}") if is_consequence else error)

    def on_lost(self, attempt: Attempt, instances: Iterable[InstanceRef], reason: str) -> None:
        """The attempt that runs has ended with an instance; what is left is made by another, if there may be one."""
        if attempt is not self._attempt or self._is_over:
            return
        self._lost_attempts, self._last_loss = self._lost_attempts + 1, reason
        if self._lost_attempts >= self.max_attempts:
            self.fail(Retryable(f"{reason}; that was the last of {self.max_attempts} attempts"))
        else:
            self._run_on(recompute=bool(self._made), lost_on=self._lost_on.union(instances))

    def fail(self, error: Exception) -> None:
        """It ends with that error, unless it has ended."""
        if not self._is_over:
            self._error = error
            self._on_news()

    def _take(self, output: SequenceOutput) -> None:
        if self.first_token_s is None and output.token_ids:
            self.first_token_s = time.monotonic() - self.started_s
            self.cached_tokens = output.cached_tokens
            self.prompt_logprobs = output.prompt_logprobs
            self.on_first_token()
        self._fresh += zip(output.token_ids, output.logprobs or repeat(None), strict=False)
        self._made.extend(output.token_ids)
        self.completion_tokens += len(output.token_ids)

    @property
    def _lost_on(self) -> frozenset[InstanceRef]:
        return frozenset() if self._attempt is None else self._attempt.wanted.lost_on

    def _run_on(self, *, recompute: bool, lost_on: frozenset[InstanceRef]) -> None:
        """The attempt is over, the request is not: the rest is made elsewhere, from the tokens there are."""
        assert self._attempt is not None
        self._attempt.release()
        wanted = self.wanted.continued(self._made, recompute=recompute, lost_on=lost_on, losses=self._lost_attempts)
        if recompute:
            self.recomputed_tokens += len(wanted.token_ids) - 1  # the last one's never was
        self._begin(wanted)

    def abort(self) -> None:
        """The client does not want more of it."""
        if not self._is_over:
            self._ending = Ending(None)
            self._on_news()

    def _on_news(self) -> None:
        if self._asks and self._has_news:
            self.turns.ask(self._turn)

    # -- outputs out --

    def stopped(self, stop: str, num_tokens: int) -> Ending:
        """A stop string has matched: `num_tokens` tokens are the whole answer."""
        self.completion_tokens, self._ending = num_tokens, Ending(SequenceEnd.STOP, stop)
        return self._ending

    async def next(self) -> tuple[list[FreshToken], Ending | None]:
        """All tokens that have come since the last call, and the ending if there will be no more. Raises what failed
        the request: Retryable, Rejected, Exhausted. Once cancelled, it can be called again."""
        self.turns.done(self._turn)
        self._turn.clear()
        self._asks = True
        self._on_news()
        await self._turn.wait()
        self._asks = False
        if self._error is not None and not self._fresh:
            raise self._error
        fresh, self._fresh = self._fresh, []
        return fresh, self._ending

    def release(self) -> None:
        """However it has ended: nobody works on it any more."""
        self.turns.done(self._turn)
        if self._attempt is not None:
            self._attempt.release()

    # -- views --

    @property
    def sampling(self) -> SamplingParams:
        return self.wanted.sampling

    @property
    def token_ids(self) -> list[int]:
        """The prompt."""
        return self.wanted.token_ids

    @property
    def name(self) -> str:
        """Request and attempt, for people."""
        return self.wanted.request_id if self._attempt is None else str(self._attempt.ref)

    @property
    def phase(self) -> Phase:
        return Phase.PLACING if self._attempt is None else self._attempt.phase

    @property
    def ticket_at_s(self) -> float | None:
        """When the attempt that runs had its ticket."""
        attempt = self._attempt
        return None if attempt is None or attempt.ticket_s is None else attempt.made_s + attempt.ticket_s

    @property
    def ticket_s(self) -> float | None:
        """From the attempt's start to its ticket."""
        return None if self._attempt is None else self._attempt.ticket_s

    @property
    def more_attempts(self) -> int:
        """Beyond the first."""
        return max(0, self.num_attempts - 1)

    @property
    def attempt(self) -> Attempt | None:
        """The one that runs, or ran last."""
        return self._attempt

    @property
    def ending(self) -> Ending | None:
        return self._ending

    @property
    def _is_over(self) -> bool:
        return self._ending is not None or self._error is not None

    @property
    def _has_news(self) -> bool:
        return bool(self._fresh) or self._is_over

    @property
    def delivered_tokens(self) -> int:
        """Those that `next` has given out."""
        return self.completion_tokens - len(self._fresh)

    @property
    def instances(self) -> tuple[str, ...]:
        """Where it runs."""
        return () if self._attempt is None else self._attempt.instances

    @property
    def waits(self) -> tuple[str, str, tuple[str, ...]]:
        """For people: the phase, what it waits for, and on which instances."""
        if self._has_news:
            return "answering", "the client to take what has come", ()
        if self._attempt is None:
            return "waiting", "its turn to be sent off", ()
        said = f"{self.phase.value} again" if self.more_attempts else self.phase.value
        match self.phase:
            case Phase.PLACING:
                return said, "a pair of instances, then a ticket", ("broker",)
            case Phase.PREFILL:
                return said, "its first token" if self.first_token_s is None else "its next token", self.instances[:1]
        return said, "the next tokens", self.instances[1:]

    @property
    def outcome(self) -> str:
        """For people: stop, length, abort, what failed, or that the client went away."""
        if self._ending is not None:
            return "abort" if self._ending.end is None else self._ending.end.value
        return f"error: {self._error}" if self._error is not None else "the client has gone"
