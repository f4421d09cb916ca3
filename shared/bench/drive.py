"""Runs a load over client processes and collects what they report.

start processes --all ready--> start them at one moment --progress--> reports

Also one client has a process of its own: whatever is shown meanwhile does not delay what is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from stagemesh.shared.bench.frames import Frame, Job, Load, Progress, Ready, Report, Start, read_frame, to_bytes
from stagemesh.shared.bench.records import RequestRecord
from stagemesh.shared.errors import Bug, PeerLost, ProtocolViolation
from stagemesh.shared.security.client_files import ClientFiles

WORKER: Final = "stagemesh.shared.bench.worker"
HEAD_START_S: Final = 0.05  # for the word to start to reach every process
PATIENCE_S: Final = 120.0  # for a process to start, connect and make its prompts

F = TypeVar("F", bound=Frame)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The records of all requests, in order of their index. `start_s` is their zero on CLOCK_MONOTONIC, `max_lag_s` of
    the process that lagged most."""

    records: tuple[RequestRecord, ...]
    start_s: float
    max_lag_s: float


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def send(self, frame: Frame) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(to_bytes(frame))

    async def receive(self) -> Frame:
        """Raises PeerLost if the process has ended; it has said why on stderr."""
        assert self._process.stdout is not None
        try:
            return await read_frame(self._process.stdout)
        except PeerLost:
            raise PeerLost(f"a client process ended with status {await self._process.wait()}") from None

    async def ready(self) -> None:
        frame = await self.receive()
        if not isinstance(frame, Ready):
            raise ProtocolViolation(f"a client process was to be ready, and said {frame}")


@asynccontextmanager
async def _started() -> AsyncIterator[_Worker]:
    """A client process, gone at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", WORKER, stdin=pipe, stdout=pipe)
    try:
        yield _Worker(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure(
    load: Load, on_progress: Callable[[Progress], None] = lambda _: None, files: ClientFiles | None = None
) -> Measurement:
    """Sends `load` and returns when every request has ended. Raises PeerLost if a client process ends early."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(_started()) for _ in range(load.num_processes)]
        for process, worker in enumerate(workers):
            worker.send(Job(load, process, files or ClientFiles()))
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.ready())
        start = Start(time.monotonic() + HEAD_START_S)
        for worker in workers:
            worker.send(start)
        collector = _Collector(load.num_processes, on_progress)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collector.collect(i, worker)) for i, worker in enumerate(workers)]
    return _merge([task.result() for task in tasks], load.workload.num_prompts, start.at_s)


class _Collector:
    """Adds up the progress of all processes."""

    def __init__(self, num_processes: int, on_progress: Callable[[Progress], None]) -> None:
        self._latest = [Progress()] * num_processes
        self._on_progress = on_progress

    async def collect(self, process: int, worker: _Worker) -> Report:
        while True:
            match await worker.receive():
                case Progress() as progress:
                    self._latest[process] = progress
                    self._on_progress(self._sum())
                case Report() as report:
                    return report
                case frame:
                    raise ProtocolViolation(f"a client process said {frame} while it worked")

    def _sum(self) -> Progress:
        return Progress(
            sum(each.done for each in self._latest),
            sum(each.failed for each in self._latest),
            sum(each.tokens for each in self._latest),
        )


def _merge(reports: list[Report], num_prompts: int, start_s: float) -> Measurement:
    records = sorted((record for report in reports for record in report.records), key=lambda record: record.index)
    if [record.index for record in records] != list(range(num_prompts)):
        raise Bug(f"{len(records)} records came back for {num_prompts} requests")
    return Measurement(tuple(records), start_s, max(report.max_lag_s for report in reports))
