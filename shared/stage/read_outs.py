"""The questions whether a stage has read what processes had sent that have ended: one look for all that are open.

asked --next round--> the endpoint reads out --> answered
                                             --patience is over--> dropped: who asked has given up, and asks anew

A round answers those who had asked when it began: what it looked at later may be older than a later question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from stagemesh.shared.errors import Rejected

PATIENCE_S: Final = 10.0  # longer than any asker's deadline


class ReadOuts:
    """Of one stage. `answer` is told the number of a question, and the reason if nothing can be said."""

    def __init__(
        self,
        read_out: Callable[[], Awaitable[None]],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        answer: Callable[[int, str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._read_out, self._spawn, self._answer, self._patience_s = read_out, spawn, answer, patience_s
        self._asked: list[int] = []
        self._running = False

    def ask(self, number: int) -> None:
        self._asked.append(number)
        if not self._running:
            self._running = True
            self._spawn(self._run())

    async def _run(self) -> None:
        """Ends once nobody asks any more."""
        try:
            while self._asked:
                numbers, self._asked = self._asked, []
                await self._round(numbers)
        finally:
            self._running = False

    async def _round(self, numbers: list[int]) -> None:
        error = ""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._read_out()
        except TimeoutError:
            return
        except Rejected as refused:
            error = str(refused)
        for number in numbers:
            self._answer(number, error)
