"""What a stage on a GPU does on the host; the device's part is played, by steps that are over when a test says so."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage import cuda_executor as cuda_executor_module
from stagemesh.shared.stage.completions import Launched
from stagemesh.shared.stage.cuda_executor import CudaStageExecutor


class PlayedFrames:
    def __init__(self, most_ids: int) -> None:
        self.over = threading.Event()

    def take(self) -> Any:
        return SimpleNamespace(begun=0, computed=0, done=0)

    def give_back(self, frame: Any) -> None: ...

    def wait(self, event: Any) -> None:
        self.over.wait()

    def between_ms(self, first: Any, then: Any) -> float:
        return 1.0

    def ids(self, frame: Any, count: int) -> Any:
        return np.zeros(count, dtype=np.int64)

    def close(self) -> None: ...


class Executor(CudaStageExecutor):
    def _launch(self, command: Command, step: Step) -> Launched:
        self._runner.apply(command)
        return Launched(self._frames.take(), 0, None, {}, 0, 0)


def test_a_sequence_may_be_dropped_before_the_stage_hears_of_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage has said that the step is over; this one's thread has not been woken yet."""
    monkeypatch.setattr(cuda_executor_module, "Frames", PlayedFrames)
    told: list[tuple[int, list[int], int]] = []
    kv = SimpleNamespace(join=None, cancel=None, progressed=lambda *progress: told.append(progress))
    pool = torch.zeros(8, 1, 2, 4, 1, 4)
    runner = StageRunner(cast("Any", SimpleNamespace(dtype=pool.dtype)), pool, first=True, last=False)

    async def run() -> None:
        failed: list[BaseException | None] = []

        def spawn(work: Any) -> None:
            asyncio.ensure_future(work).add_done_callback(lambda task: failed.append(task.exception()))

        executor = Executor(
            cast("Any", runner),
            cast("Any", SimpleNamespace(applied=lambda number: None)),
            stream=cast("Any", None),
            beside=None,
            inbox=None,
            outbox=None,
            first=True,
            last=False,
            hidden_size=4,
            max_rows=8,
            kv=cast("Any", kv),
            spawn=spawn,
            tracer=Tracer("test"),
        )
        running = asyncio.create_task(executor.run())
        join = Join(1, RequestRef("r", 1), SamplingParams(1), None, 3)
        step = Step(1, 0, np.array([[1, 0, 3, 0, 0, SAMPLE]], dtype=np.int64), np.array([3, 4, 5]))
        executor.submit(Command(1, joins=(join,), page_deltas=pack_deltas({1: [6]}), step=step))
        executor.submit(Command(2, drops=(1,)))
        async with asyncio.timeout(20):
            while executor.num_queued or executor.step is not None or runner.num_residents:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
            assert executor.steps_done == 0
            cast("Any", executor._frames).over.set()
            while not executor.steps_done and not failed:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not failed

    asyncio.run(run())
    assert told == [(1, [6], 3)]
