"""Opening a ticket in such a way that none is left behind, whenever the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.rpc.broker import BrokerClient
from stagemesh.shared.runtime.backoff import retry

GONE: Final = "the client has gone"

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Tickets:
    """The router's side of tickets. `spawn` puts a task under the router's supervisor."""

    def __init__(self, broker: BrokerClient, spawn: Spawn) -> None:
        self._broker, self._spawn = broker, spawn

    async def open(
        self, request: RequestRef, prefill: InstanceRef, decode: InstanceRef, prompt_tokens: int, max_tokens: int
    ) -> str:
        """A new ticket's id. The call runs on when the caller is cancelled, and what it opens then is failed: cancelled
        with the caller, it might leave a ticket that nobody knows."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        opening = self._broker.open_ticket(request, prefill, decode, prompt_tokens, max_tokens)
        self._spawn(self._open(opening, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.fail(answer.result(), GONE)  # it came in the very turn in which the caller was cancelled
            raise

    def fail(self, ticket_id: str, reason: str) -> None:
        """It will not be used."""
        self._spawn(self._fail(ticket_id, reason))

    async def _open(self, opening: Coroutine[Any, Any, str], answer: asyncio.Future[str]) -> None:
        try:
            ticket_id = await opening
        except StagemeshError as error:
            if not answer.done():
                answer.set_exception(error)
            return
        if answer.done():
            await self._fail(ticket_id, GONE)
        else:
            answer.set_result(ticket_id)

    async def _fail(self, ticket_id: str, reason: str) -> None:
        await retry(lambda: self._broker.fail_ticket(ticket_id, reason))
