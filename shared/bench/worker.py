"""A client process of a benchmark: `python -m stagemesh.shared.bench.worker`, which talks frames on stdin and stdout.

It ends by itself when its parent has gone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Final

from stagemesh.shared.bench.client import GENERATOR, LoadClient
from stagemesh.shared.bench.frames import Frame, Job, Ready, Report, Start, read_frame, to_bytes
from stagemesh.shared.bench.workload import plan
from stagemesh.shared.errors import PeerLost, ProtocolViolation, StagemeshError
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.access import router_dial
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.exits import report_failure
from stagemesh.shared.runtime.loop import LagSampler, run

CONNECT_TIMEOUT_S: Final = 30.0
PROGRESS_INTERVAL_S: Final = 0.25
LAG_INTERVAL_S: Final = 0.01


async def _serve() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    job = await read_frame(reader)
    if not isinstance(job, Job):
        raise ProtocolViolation(f"a client process begins with a job, not with {job}")
    planned = plan(job.load.workload, job.process, job.load.num_processes)
    async with Client(job.load.router, GENERATOR, dial=router_dial(job.files)) as client:
        await client.call("GetModelInfo", generator_pb2.GetModelInfoRequest(), timeout_s=CONNECT_TIMEOUT_S)
        load = LoadClient(client, job.load, job.process, planned)
        gc.collect()
        gc.freeze()  # prompts are many and stay: no collection needs to look at them again
        _write(Ready())
        start = await read_frame(reader)
        if not isinstance(start, Start):
            raise ProtocolViolation(f"a start was to come, not {start}")
        _write(await _measure(load, start.at_s, reader))


async def _measure(load: LoadClient, start_s: float, reader: asyncio.StreamReader) -> Report:
    lag = LagSampler(LAG_INTERVAL_S)
    async with asyncio.TaskGroup() as group:
        besides: tuple[Coroutine[Any, Any, None], ...] = (lag.run(), _show_progress(load), _watch_parent(reader))
        tasks = [group.create_task(work) for work in besides]
        records = await load.run(start_s)
        for task in tasks:
            task.cancel()
    return Report(records, lag.max_lag_s)


async def _show_progress(load: LoadClient) -> None:
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        _write(load.progress)


async def _watch_parent(reader: asyncio.StreamReader) -> None:
    await reader.read()
    raise PeerLost("the benchmark has been ended")


def _write(frame: Frame) -> None:
    """Blocks while the pipe is full; the parent does nothing but read."""
    data = memoryview(to_bytes(frame))
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def main() -> int:
    """Ctrl-C reaches the parent too, which closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(_serve())
    except BrokenPipeError:
        return 1
    except (StagemeshError, ExceptionGroup) as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
