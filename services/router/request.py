"""A live request in the router: one attempt on a pair of instances, and its outputs on their way to the client.

place -> ticket -> submit to decode, then to prefill -> first token (prefill) -> tokens (decode) -> end
An abort, a deadline or a disconnect may come anywhere: both sides are told, once, by `release`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import repeat

from stagemesh.services.router.answer import FreshToken
from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.opening import Tickets
from stagemesh.services.router.placement import Placement, place
from stagemesh.services.router.session import HeadSession
from stagemesh.services.router.turns import Turns
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import Rejected, Retryable, StagemeshError

PLACEMENT_WAIT_S = 5.0  # for a pair of instances to be there


@dataclass(frozen=True, slots=True)
class Ending:
    """Why it is over: STOP or LENGTH; None is an abort. `stop` is the stop string that matched, if one did."""

    end: SequenceEnd | None
    stop: str = ""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Takes outputs from two heads and gives them to one client, in order."""

    ref: RequestRef
    sampling: SamplingParams
    token_ids: list[int]
    started_s: float = field(default_factory=time.monotonic)
    ticket_s: float | None = None  # it came so long after the start
    first_token_s: float | None = None
    completion_tokens: int = 0
    turns: Turns = field(default_factory=Turns)  # the router's, which all its requests share
    _fresh: list[FreshToken] = field(default_factory=list)
    _ending: Ending | None = None
    _error: Exception | None = None
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _asks: bool = False  # its client waits for what comes
    _prefill: HeadSession | None = None
    _decode: HeadSession | None = None

    async def start(self, mesh: MeshView, tickets: Tickets) -> None:
        """Sends it off. Raises Retryable if nobody can take it within PLACEMENT_WAIT_S."""
        placement = await self._place(mesh)
        prefill = placement.prefill.ref
        if placement.decode is None:
            self._prefill = self._submit(mesh, prefill, "", "", token_ids=self.token_ids)
            return
        decode = placement.decode.ref
        ticket_id = await tickets.open(self.ref, prefill, decode, len(self.token_ids), self.sampling.max_tokens)
        self.ticket_s = time.monotonic() - self.started_s
        try:
            self._decode = self._submit(mesh, decode, ticket_id, "", token_ids=[])
            self._prefill = self._submit(mesh, prefill, ticket_id, decode.name, token_ids=self.token_ids)
        except StagemeshError:
            tickets.fail(ticket_id, "it could not be sent off")
            raise

    async def _place(self, mesh: MeshView) -> Placement:
        deadline_s = time.monotonic() + PLACEMENT_WAIT_S
        while True:
            mesh.changed.clear()
            try:
                return place(
                    mesh, prompt_tokens=len(self.token_ids), max_tokens=self.sampling.max_tokens, sent=mesh.sent
                )
            except Retryable:
                if time.monotonic() >= deadline_s:
                    raise
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s - time.monotonic()):
                    await mesh.changed.wait()
            except TimeoutError:
                pass

    def _submit(
        self, mesh: MeshView, instance: InstanceRef, ticket_id: str, decode_instance: str, *, token_ids: list[int]
    ) -> HeadSession:
        session = mesh.session(instance)
        session.submit(
            self,
            self.ref,
            self.sampling,
            prompt_tokens=len(self.token_ids),
            token_ids=token_ids,
            ticket_id=ticket_id,
            decode_instance=decode_instance,
        )
        mesh.sent[instance.name] = mesh.sent.get(instance.name, 0) + 1
        return session

    # -- outputs in --

    def on_output(self, ref: InstanceRef, output: SequenceOutput) -> None:
        """An output of either head. Nothing counts any more once the request has ended."""
        if self._ending is not None or self._error is not None:
            return
        if output.end is SequenceEnd.FAILED:
            self._error = Retryable(output.error)
        elif output.end is SequenceEnd.REJECTED:
            name, _, message = output.error.partition(": ")
            self._error = Rejected(name, message or output.error)
        else:
            self._take(output)
        self._on_news()

    def _on_news(self) -> None:
        if self._asks:
            self.turns.ask(self._turn)

    def _take(self, output: SequenceOutput) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.started_s
            if output.end is None and self._decode is not None:
                self._decode.first_token(self.ref, output.token_ids[0])
        self._fresh += zip(output.token_ids, output.logprobs or repeat(None), strict=False)
        self.completion_tokens += len(output.token_ids)
        if output.end is not None:
            self._ending = Ending(output.end)

    def abort(self) -> None:
        """The client does not want more of it."""
        if self._ending is None and self._error is None:
            self._ending = Ending(None)
            self._on_news()

    # -- outputs out --

    def stopped(self, stop: str, num_tokens: int) -> Ending:
        """A stop string has matched: `num_tokens` tokens are the whole answer."""
        self.completion_tokens, self._ending = num_tokens, Ending(SequenceEnd.STOP, stop)
        return self._ending

    async def next(self) -> tuple[list[FreshToken], Ending | None]:
        """All tokens that have come since the last call, and the ending if there will be no more. Raises what failed
        the request: Retryable or Rejected."""
        self.turns.done(self._turn)
        self._turn.clear()
        self._asks = True
        if self._fresh or self._ending is not None or self._error is not None:
            self._on_news()
        await self._turn.wait()
        self._asks = False
        if self._error is not None and not self._fresh:
            raise self._error
        fresh, self._fresh = self._fresh, []
        return fresh, self._ending

    @property
    def ending(self) -> Ending | None:
        return self._ending

    @property
    def delivered_tokens(self) -> int:
        """Those that `next` has given out."""
        return self.completion_tokens - len(self._fresh)

    @property
    def instances(self) -> tuple[str, ...]:
        """Where it runs."""
        return tuple(session.ref.name for session in (self._prefill, self._decode) if session is not None)

    @property
    def waits(self) -> tuple[str, str, tuple[str, ...]]:
        """For people: the phase, what it waits for, and on which instances."""
        if self._prefill is None:
            return "placing", "a pair of instances, then a ticket", ("broker",)
        if self._fresh or self._ending is not None or self._error is not None:
            return "answering", "the client to take what has come", ()
        if self.first_token_s is None:
            return "prefill", "its first token", (self._prefill.ref.name,)
        return "decode", "the next tokens", self.instances[1:]

    @property
    def outcome(self) -> str:
        """For people: stop, length, abort, what failed, or that the client went away."""
        if self._ending is not None:
            return "abort" if self._ending.end is None else self._ending.end.value
        return f"error: {self._error}" if self._error is not None else "the client has gone"

    def release(self) -> None:
        """However it has ended: neither head works on it any more."""
        self.turns.done(self._turn)
        for session in (self._prefill, self._decode):
            if session is not None:
                session.abort(self.ref)
