"""Opening a ticket in such a way that none is left behind, whenever the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.errors import StagemeshError, Unreachable
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.broker import BrokerClient
from stagemesh.shared.runtime.backoff import delays, retry

GONE: Final = "the client has gone"

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Tickets:
    """The router's side of tickets. `spawn` puts a task under the router's supervisor. A broker that is away is waited
    for up to `wait_s`."""

    def __init__(self, broker: BrokerClient, spawn: Spawn, log: Log, wait_s: float = 15.0) -> None:
        self._broker, self._spawn, self._log, self._wait_s = broker, spawn, log, wait_s

    async def open(
        self, request: RequestRef, prefill: InstanceRef, decode: InstanceRef, prompt_tokens: int, max_tokens: int
    ) -> str:
        """A new ticket's id. The call runs on when the caller is cancelled, and what it opens then is failed: cancelled
        with the caller, it might leave a ticket that nobody knows. Raises Unreachable when the wait is over."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._spawn(
            self._open(lambda: self._broker.open_ticket(request, prefill, decode, prompt_tokens, max_tokens), answer)
        )
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.fail(answer.result(), GONE)  # it came in the very turn in which the caller was cancelled
            raise

    def fail(self, ticket_id: str, reason: str) -> None:
        """It will not be used."""
        self._spawn(self._fail(ticket_id, reason))

    async def _open(self, opening: Callable[[], Awaitable[str]], answer: asyncio.Future[str]) -> None:
        try:
            ticket_id = await self._patiently(opening)
        except StagemeshError as error:
            if not answer.done():
                answer.set_exception(error)
            return
        if answer.done():
            await self._fail(ticket_id, GONE)
        else:
            answer.set_result(ticket_id)

    async def _patiently(self, opening: Callable[[], Awaitable[str]]) -> str:
        """Tried again while nobody answers: the broker gives the same ticket for the same attempt."""
        try:
            async with asyncio.timeout(self._wait_s):
                for delay_s in delays():
                    try:
                        return await opening()
                    except Unreachable:
                        await asyncio.sleep(delay_s)
        except TimeoutError:
            pass
        raise Unreachable(f"the broker is away: no ticket within {self._wait_s:g} s")

    async def _fail(self, ticket_id: str, reason: str) -> None:
        try:
            await retry(lambda: self._broker.fail_ticket(ticket_id, reason))
        except StagemeshError as error:
            self._log.warning("a ticket cannot be failed", ticket_id=ticket_id, error=str(error))
