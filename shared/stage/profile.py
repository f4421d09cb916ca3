"""Profiles a stage while it serves: what its forward thread and its GPU do, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from stagemesh.shared.errors import Exhausted, Rejected
from stagemesh.shared.stage.executor import StageExecutor

LONGEST_S: Final = 60.0


class StageProfiler:
    """One recording at a time, since the profiler is the process's. Files go to `directory`, named after `stage`."""

    def __init__(self, executor: StageExecutor, directory: Path, stage: str) -> None:
        self._executor, self._directory, self._stage = executor, directory, stage
        self._recording = False

    async def record(self, seconds: float) -> Path:
        """The file with what happened in so many seconds. Raises Rejected for a time out of its limits, Exhausted while
        another recording runs."""
        if not 0 < seconds <= LONGEST_S:
            raise Rejected("seconds", f"must be over 0 and at most {LONGEST_S:g}, got {seconds:g}")
        if self._recording:
            raise Exhausted("a profile is being recorded already; come back when it has ended")
        self._recording = True
        try:
            return await self._record(seconds)
        finally:
            self._recording = False

    async def _record(self, seconds: float) -> Path:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recorded = profile(activities=activities)
        await self._executor.between_steps(recorded.start)  # it records the thread that starts it, and the GPU
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.shield(self._executor.between_steps(recorded.stop))
        path = self._directory / f"profile-{self._stage}-{time.time_ns() // 1_000_000}.json"
        await asyncio.to_thread(recorded.export_chrome_trace, str(path))
        return path
