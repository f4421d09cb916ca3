"""The thread that a stage computes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")
CLOSE_S: Final = 2.0
_Call = tuple[Callable[[], Any], asyncio.Future[Any]]


class ForwardThread:
    """Runs one call after the other, `prepare` first. A daemon: nobody waits in vain for what may be what hangs."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()  # bounded by its callers, who wait
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, args=(prepare,), name="forward", daemon=True).start()

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises what it raises. If the caller is cancelled, the call runs on."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((work, done))
        return await done

    async def close(self) -> None:
        """Waits for what runs, up to CLOSE_S."""
        self._calls.put(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._ended.wait()

    def _run(self, prepare: Callable[[], object]) -> None:
        broken: Exception | None = None
        try:
            prepare()
        except Exception as error:  # it is every caller's
            broken = error
        while (call := self._calls.get()) is not None:
            work, done = call
            try:
                if broken is not None:
                    raise broken
                result = work()
            except Exception as error:  # the caller's, whatever it is
                self._tell(_fail, done, error)
            else:
                self._tell(_finish, done, result)
        self._tell(self._ended.set)

    def _tell(self, what: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what, *arguments)


def _finish(done: asyncio.Future[Any], result: Any) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
