"""What the head asks every stage, and their answers.

question --round the ring--> each stage does what it asks --answer--> the head, when all have
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Said:
    """By all stages: the first error, in words, or nothing, and how many pieces of KV are not what was sent."""

    error: str
    num_wrong: int


@dataclass(slots=True)
class _Open:
    left: set[int]  # ranks that have not answered
    error: str = ""  # the first one
    num_wrong: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class Questions:
    """Of one head."""

    def __init__(self) -> None:
        self._asked = 0
        self._open: dict[int, _Open] = {}

    async def ask(self, pp_size: int, put: Callable[[int], None]) -> Said:
        """Puts a question under a number of its own, and returns when every stage has answered."""
        self._asked += 1
        number = self._asked
        question = self._open[number] = _Open(set(range(pp_size)))
        try:
            put(number)
            await question.answered.wait()
        finally:
            del self._open[number]
        return Said(question.error, question.num_wrong)

    def answered(self, number: int, pp_rank: int, error: str, num_wrong: int = 0) -> None:
        """By that stage. Too late for a question that nobody waits for any more."""
        if (question := self._open.get(number)) is None:
            return
        question.left.discard(pp_rank)
        question.error = question.error or error
        question.num_wrong += num_wrong
        if not question.left:
            question.answered.set()
