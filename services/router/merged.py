"""Several streams as one, in the order in which their messages come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources. An error of one ends all; so does closing this. A source is a message ahead at most."""
    queue: asyncio.Queue[_Item[T] | _End] = asyncio.Queue(len(sources))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_drain(source, queue)) for source in sources]
        left = len(sources)
        try:
            while left:
                match await queue.get():
                    case _Item(value):
                        yield value
                    case _End(error):
                        if error is not None:
                            raise error
                        left -= 1
        except GeneratorExit:  # not an error of the group's: it is closed as it is left
            return
        finally:
            for task in tasks:
                task.cancel()


async def _drain(source: AsyncGenerator[T, None], queue: asyncio.Queue[_Item[T] | _End]) -> None:
    error = None
    try:
        async with aclosing(source):
            async for value in source:
                await queue.put(_Item(value))
    except Exception as raised:
        error = raised
    await queue.put(_End(error))
