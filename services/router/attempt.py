"""One attempt at a request: a pair of instances, a ticket, and the outputs of two heads.

placing --a pair, a ticket, submitted to decode, then to prefill--> prefill --first token--> decode --> over
   |`--nobody can take it: failed                                      |                       |
   `--the pair has just gone: lost                                     `--an instance is lost--'--> lost

An attempt may end before its request does. What is left then runs on elsewhere, as a new attempt with a number of its
own, whose prompt is the old one and all tokens made since. What heads say of a released attempt is dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol

from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.last_stages import StageLost
from stagemesh.services.router.opening import Spawn, Tickets
from stagemesh.services.router.placement import Drained, Placement
from stagemesh.services.router.session import HeadSession
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import Retryable, StagemeshError, Unreachable

PLACEMENT_WAIT_S = 5.0  # for a pair of instances to be there
SEND_OFF_S = 1.0  # the same, where an instance has been lost
NEWS_WAIT_S = 0.25  # for the directory to say that an instance has gone
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0  # before it runs where it was lost before: what broke may need a moment


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt is to make: up to `sampling.max_tokens` tokens after `token_ids`. `arrived_s` (CLOCK_MONOTONIC)
    is when the request came, whichever attempt this is; `recompute`: its KV was there and is lost. `lost_on` are
    instances that earlier attempts, `losses` in number, were lost with: others are better, and none is waited for."""

    request_id: str
    sampling: SamplingParams
    token_ids: list[int]
    priority: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    recompute: bool = False
    lost_on: frozenset[InstanceRef] = frozenset()
    losses: int = 0

    def continued(
        self,
        made: Sequence[int],
        *,
        recompute: bool,
        lost_on: frozenset[InstanceRef] = frozenset(),
        losses: int = 0,
    ) -> Wanted:
        """What is left once `made` has been: the same tokens follow, since a draw depends on seed and position only."""
        left = dataclasses.replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - len(made),
            min_tokens=max(0, self.sampling.min_tokens - len(made)),
            prompt_logprobs=None if made else self.sampling.prompt_logprobs,
            generated=(*self.sampling.generated, *made) if self.sampling.needs_output else (),
        )
        tokens = [*self.token_ids, *made]
        return dataclasses.replace(
            self, sampling=left, token_ids=tokens, recompute=recompute, lost_on=lost_on, losses=losses
        )


class Owner(Protocol):
    """Whose attempt it is."""

    def on_output(self, attempt: Attempt, output: SequenceOutput) -> None: ...

    def on_lost(self, attempt: Attempt, instances: Iterable[InstanceRef], reason: str) -> None:
        """Through no fault of the request, with one of `instances`."""
        ...

    def on_failure(self, attempt: Attempt, error: Exception) -> None: ...


class Phase(Enum):
    PLACING = "placing"
    PREFILL = "prefill"
    DECODE = "decode"


class Attempt:
    """Tells its owner what the heads say, until it is released."""

    def __init__(self, ref: RequestRef, wanted: Wanted, owner: Owner) -> None:
        self.ref, self.wanted, self._owner = ref, wanted, owner
        self.ticket_s: float | None = None  # it came so long after the start
        self.made_s = time.monotonic()
        self._pair: tuple[InstanceRef, ...] = ()
        self._prefill: HeadSession | None = None
        self._decode: HeadSession | None = None
        self._fail_ticket: Callable[[str], None] | None = None  # while the broker may have it open
        self._has_first_token = self._released = False
        self._starting: asyncio.Task[None] | None = None

    async def start(self, mesh: MeshView, tickets: Tickets) -> None:
        """Sends it off, or tells the owner why it cannot be: Retryable if nobody takes it within PLACEMENT_WAIT_S, or
        the broker is away for too long."""
        if self._released:
            return
        self._starting = asyncio.current_task()
        failure: Exception | None = None
        try:
            await self._send_off(mesh, tickets)
        except Exception as error:  # of this request, whatever it is: others go on
            failure = error
        finally:
            self._starting = None
        lost_with = (failure.instance,) if isinstance(failure, StageLost) else self._pair
        if isinstance(failure, Retryable) and not isinstance(failure, Unreachable) and lost_with:
            self._owner.on_lost(self, lost_with, str(failure))
        elif failure is not None:
            self._owner.on_failure(self, failure)

    async def _send_off(self, mesh: MeshView, tickets: Tickets) -> None:
        """This view of the directory may lag behind the broker's: a pair that is not there any more when the ticket is
        opened costs no attempt, but a moment in which the news may come. A last stage that does not answer costs one:
        it is known which instance to avoid."""
        deadline_s = time.monotonic() + (SEND_OFF_S if self.wanted.lost_on else PLACEMENT_WAIT_S)
        if self.wanted.lost_on and self._was_lost_on(await self._place(mesh)):
            await asyncio.sleep(pause_s(self.wanted.losses))
        while True:
            placement = await self._place(mesh)
            mesh.changed.clear()
            try:
                return await self._send_to(placement, mesh, tickets)
            except (Unreachable, StageLost):
                raise
            except Retryable:
                if self._decode is not None or self._prefill is not None or time.monotonic() >= deadline_s:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(NEWS_WAIT_S):
                    await mesh.changed.wait()

    def _was_lost_on(self, placement: Placement) -> bool:
        infos = (placement.prefill, placement.decode)
        return any(info is not None and info.ref in self.wanted.lost_on for info in infos)

    async def _send_to(self, placement: Placement, mesh: MeshView, tickets: Tickets) -> None:
        wanted = self.wanted
        prefill = placement.prefill.ref
        self._pair = (prefill,) if placement.decode is None else (prefill, placement.decode.ref)
        if wanted.sampling.structure is not None:
            instances = [info for info in (placement.prefill, placement.decode) if info is not None]
            await mesh.prepare(instances, wanted.sampling.structure)
        if placement.decode is None:
            self._prefill = self._submit(mesh, prefill, "", None, token_ids=wanted.token_ids)
            return
        decode = placement.decode.ref
        ticket_id = await tickets.open(self.ref, prefill, decode, len(wanted.token_ids), wanted.sampling.max_tokens)
        self.ticket_s = time.monotonic() - self.made_s
        self._fail_ticket = partial(tickets.fail, ticket_id)
        try:
            self._decode = self._submit(mesh, decode, ticket_id, prefill, token_ids=[])
            self._prefill = self._submit(mesh, prefill, ticket_id, decode, token_ids=wanted.token_ids)
        except StagemeshError:
            self._give_up_ticket("it could not be sent off")
            raise

    async def _place(self, mesh: MeshView) -> Placement:
        wanted = self.wanted
        deadline_s = time.monotonic() + (0.0 if wanted.lost_on else PLACEMENT_WAIT_S)
        while True:
            mesh.changed.clear()
            try:
                return mesh.place(wanted.token_ids, wanted.sampling.max_tokens, wanted.lost_on)
            except Drained:  # until it is taken back, or is gone, and another may come
                deadline_s = time.monotonic() + PLACEMENT_WAIT_S
            except Retryable:
                if time.monotonic() >= deadline_s:
                    raise
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s - time.monotonic()):
                    await mesh.changed.wait()
            except TimeoutError:
                pass

    def _submit(
        self, mesh: MeshView, instance: InstanceRef, ticket_id: str, peer: InstanceRef | None, *, token_ids: list[int]
    ) -> HeadSession:
        """`peer` is the other leg of the ticket."""
        session, wanted = mesh.session(instance), self.wanted
        session.submit(
            self,
            self.ref,
            wanted.sampling,
            prompt_tokens=len(wanted.token_ids),
            token_ids=token_ids,
            ticket_id=ticket_id,
            peer=peer,
            priority=wanted.priority,
            waited_s=time.monotonic() - wanted.arrived_s,
            recompute=wanted.recompute,
        )
        mesh.note_sent(instance, token_ids)
        return session

    def on_output(self, output: SequenceOutput) -> None:
        """An output of either head. The first token comes from prefill, and decode has to be told."""
        if self._released:
            return
        if output.token_ids and not self._has_first_token:
            self._has_first_token = True
            if output.end is None and self._decode is not None:
                self._decode.first_token(self.ref, output.token_ids[0])
        elif output.token_ids:
            self._fail_ticket = None  # it is decode's, which has all KV
        if output.end is SequenceEnd.LOST:  # either of the two, for all that its head can tell
            self._owner.on_lost(self, self._pair, output.error)
        else:
            self._owner.on_output(self, output)

    def on_lost(self, instance: InstanceRef, reason: str) -> None:
        """A prefill instance is not missed once it has sent all KV. Whether it has, the decode head will say.

        Otherwise the ticket is failed here too: of what was written to a link that was dead already no head knows. One
        that has been committed the broker leaves alone."""
        is_decodes = self._has_first_token and self._decode is not None and self._decode.ref != instance
        if not (self._released or is_decodes):
            self._give_up_ticket(reason)
            self._owner.on_lost(self, (instance,), reason)

    def _give_up_ticket(self, reason: str) -> None:
        if self._fail_ticket is not None:
            self._fail_ticket(reason)
            self._fail_ticket = None

    @property
    def phase(self) -> Phase:
        if self._prefill is None:
            return Phase.PLACING
        return Phase.DECODE if self._has_first_token else Phase.PREFILL

    @property
    def instances(self) -> tuple[str, ...]:
        """Where it runs: prefill, then decode."""
        return tuple(session.ref.name for session in (self._prefill, self._decode) if session is not None)

    def release(self) -> None:
        """However it has ended: neither head works on it any more. What ends before its first token may be known to no
        head, as above."""
        if not (self._released or self._has_first_token):
            self._give_up_ticket("aborted")
        self._released = True
        if self._starting is not None:
            self._starting.cancel()
        for session in (self._prefill, self._decode):
            if session is not None:
                session.abort(self.ref)


def pause_s(losses: int) -> float:
    """After so many lost attempts."""
    return float(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, losses - 1)))


Start = Callable[[Wanted, Owner], Attempt]


class Starter:
    """Starts attempts, each under a number of its own. `spawn` puts a task under the router's supervisor."""

    def __init__(self, mesh: MeshView, tickets: Tickets, spawn: Spawn) -> None:
        self._mesh, self._tickets, self._spawn = mesh, tickets, spawn
        # heads may still be letting go of a request whose id is used again, here or by another router
        self._numbers = itertools.count(secrets.randbelow(1 << 30) + 1)

    def __call__(self, wanted: Wanted, owner: Owner) -> Attempt:
        attempt = Attempt(RequestRef(wanted.request_id, next(self._numbers)), wanted, owner)
        self._spawn(attempt.start(self._mesh, self._tickets))
        return attempt
