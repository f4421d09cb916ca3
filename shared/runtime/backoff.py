"""Trying again: how long to wait between attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from stagemesh.shared.errors import Retryable

T = TypeVar("T")


def delays(first_s: float = 0.05, most_s: float = 1.0) -> Iterator[float]:
    """Doubling from `first_s` to `most_s`, each a random half to whole of that."""
    delay_s = first_s
    while True:
        yield delay_s * random.uniform(0.5, 1.0)
        delay_s = min(most_s, delay_s * 2)


async def retry(attempt: Callable[[], Awaitable[T]]) -> T:
    """Calls `attempt` until it does not raise Retryable. The caller's deadline or cancellation ends it."""
    for delay_s in delays():
        try:
            return await attempt()
        except Retryable:
            await asyncio.sleep(delay_s)
    raise AssertionError("delays never end")
