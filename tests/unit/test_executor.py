"""Forward passes run on a thread of their own, which may yield the cores without the loop doing so."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from stagemesh.shared.core.commands import SAMPLE, Command, Step
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.executor import StageExecutor, yield_cores


def test_only_the_forward_thread_yields_the_cores() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with ThreadPoolExecutor(1, "forward", partial(yield_cores, 5)) as worker:
        there = worker.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert there == 5
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_prompt_that_starts_behind_cached_pages_is_sent_from_its_beginning() -> None:
    """The sender is told how far the prompt is, not how much of it was computed."""
    told: list[tuple[int, list[int], int]] = []
    kv = SimpleNamespace(join=None, cancel=None, progressed=lambda *progress: told.append(progress))
    runner = SimpleNamespace(pages_of=lambda handle: [handle, handle + 1])
    executor = StageExecutor(
        cast("Any", runner),
        cast("Any", None),
        receiver=None,
        sender=None,
        kv=cast("Any", kv),
        spawn=lambda task: task.close(),
        tracer=Tracer("test"),
    )
    rows = np.array([[1, 32, 5, 0, 0, SAMPLE], [2, 0, 7, 0, 0, 0]], dtype=np.int64)
    executor._after(Command(1, step=Step(1, 0, rows, np.arange(12))))
    assert told == [(1, [1, 2], 37), (2, [2, 3], 7)]
