"""Tasks that come and go under one supervisor: a failure of any ends the service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """`spawn` works before `run` too: what is spawned early starts with it. Once a failure ends the service, what is
    spawned is dropped: who spawns it has more to let go of."""

    def __init__(self) -> None:
        self._early: list[Coroutine[Any, Any, None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running) + len(self._early)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._group is None:
            self._early.append(work)
            return
        try:
            task = self._group.create_task(work)
        except RuntimeError:  # the group is shutting down
            work.close()
            return
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def run(self) -> None:
        """A child of the service: runs until cancelled. Raises the ExceptionGroup of a task that failed."""
        async with asyncio.TaskGroup() as self._group:
            early, self._early = self._early, []
            for work in early:
                self.spawn(work)
            await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """What never started never will."""
        for work in self._early:
            work.close()
        self._early.clear()
