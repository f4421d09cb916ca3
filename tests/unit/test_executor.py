"""Forward passes run on a thread of their own, which may yield the cores without the loop doing so."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from stagemesh.shared.stage.executor import yield_cores


def test_only_the_forward_thread_yields_the_cores() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with ThreadPoolExecutor(1, "forward", partial(yield_cores, 5)) as worker:
        there = worker.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert there == 5
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
