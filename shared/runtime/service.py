"""The life of a service process, the same for all four kinds.

start ---> ready ---> serving --SIGTERM, SIGINT or stop--> draining ---> closed
  |                      |                                    |
  +--signal: cancelled   +--a child failed: closed, raises    +--second signal or deadline: cut off, exit code 1

Resources are entered into one stack while starting and left in reverse order at the end, whichever way it comes.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final, Protocol, TypeVar

from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.drain import CLOSE_GRACE_S
from stagemesh.shared.runtime.exits import EXIT_FAILED
from stagemesh.shared.runtime.loop import freeze_heap, run
from stagemesh.shared.runtime.notify import Notifier

T = TypeVar("T")
Child = Coroutine[Any, Any, None]
KEEP_ALIVES: Final = 4  # in the time of the watchdog: one that is lost does no harm


class Service(Protocol):
    """What `run_service` needs of a service."""

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        """Enters resources into `stack`; returns the children that run as long as the service does."""
        ...

    async def withdraw(self) -> None:
        """Leaves the directory and refuses new work from now on."""
        ...

    async def idle(self) -> None:
        """Returns when nothing is in flight."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """What is in flight; all zero when nothing is."""
        ...

    @property
    def address(self) -> str | None:
        """Where it listens, if only known after `start`; else None."""
        ...


class StopSignals:
    """What asks the service to stop: the first signal drains, the second cuts the drain short. A service may also set
    `drain` itself, which is no signal: the one that comes then is the first."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.cut_off = asyncio.Event()
        self._signalled = False

    def stop(self) -> None:
        (self.cut_off if self._signalled else self.drain).set()
        self._signalled = True


def run_to_end(
    service: Service,
    *,
    drain_timeout_s: float,
    notifier: Notifier,
    log: Log,
    signals: StopSignals | None = None,
) -> None:
    """`run_service` in a loop of its own. Exits with 1 if something had to be cut off, and says what."""
    cut_off = run(run_service(service, drain_timeout_s=drain_timeout_s, notifier=notifier, signals=signals))
    if cut_off is not None:
        fields: dict[str, Any] = dict(cut_off)
        log.error("work was cut off", **fields)
        sys.exit(EXIT_FAILED)


async def run_service(
    service: Service, *, drain_timeout_s: float, notifier: Notifier, signals: StopSignals | None = None
) -> Mapping[str, int] | None:
    """Runs `service` until it is told to stop, then drains it. What had to be cut off, or None if nothing had.

    Raises the ExceptionGroup of a start or a child that failed; then everything is closed already.
    """
    signals = signals or StopSignals()
    with _handled(signals.stop):
        async with AsyncExitStack() as stack:
            children = await _until(signals.drain, service.start(stack), _keep_alive(notifier))
            if children is None:
                return None
            freeze_heap()
            notifier.ready(service.address)
            return await _serve(service, children, signals, drain_timeout_s, notifier)


async def _serve(
    service: Service, children: list[Child], signals: StopSignals, drain_timeout_s: float, notifier: Notifier
) -> Mapping[str, int] | None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child) for child in (*children, _keep_alive(notifier))]
        await signals.drain.wait()
        notifier.stopping(drain_timeout_s + CLOSE_GRACE_S)
        drained = await _until(signals.cut_off, _drain(service, drain_timeout_s))
        cut_off = None if drained else {what: count for what, count in service.held.items() if count}
        if cut_off is not None:
            notifier.cut_off(", ".join(f"{what} {count}" for what, count in cut_off.items()) or "its own end")
        for task in tasks:
            task.cancel()
    return cut_off


async def _keep_alive(notifier: Notifier) -> None:
    """Says that the loop runs, as often as it must be heard: also while the service starts. Children that find that
    their work stands still fail."""
    while notifier.watchdog_timeout_s is not None:
        notifier.watchdog()
        await asyncio.sleep(notifier.watchdog_timeout_s / KEEP_ALIVES)


async def _drain(service: Service, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await service.withdraw()
            await service.idle()
    except TimeoutError:
        return False
    return True


class _ToldToStop(Exception):
    pass


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, T], *beside: Child) -> T | None:
    """The result of `work`, or None if `event` came first and `work` was cancelled. `beside` run as long.

    `work` runs in the calling task, so a TaskGroup or a timeout that it enters into the stack is left by the task that
    entered it.
    """

    async def watch() -> None:
        await event.wait()
        raise _ToldToStop

    result: T | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in (watch(), *beside)]
            result = await work
            for task in tasks:
                task.cancel()
    except* _ToldToStop:
        pass
    return result


@contextmanager
def _handled(stop: Callable[[], None]) -> Iterator[None]:
    """Without a handler SIGTERM would end the process and skip every `finally`."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
