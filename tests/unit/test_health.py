"""A stage that stands still says so and ends; the thread that it computes on holds up nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.shared.errors import Bug
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.notify_socket import NotifySocket
from stagemesh.shared.runtime.silence import LOOKS, Silence
from stagemesh.shared.stage import forward
from stagemesh.shared.stage.forward import ForwardThread
from stagemesh.shared.stage.health import Health
from stagemesh.shared.stage.step_clock import WARM_UP_STEPS, StepClock

LOG = Log(logging.getLogger("stagemesh.test"))


def test_a_stage_whose_step_stands_still_serves_no_more_and_asks_to_be_killed(tmp_path: Path) -> None:
    async def run() -> None:
        listener = NotifySocket(tmp_path / "notify.sock")
        notifier, clock, said = Notifier(str(listener.path)), StepClock(), []
        for _ in range(WARM_UP_STEPS):
            clock.begin(1, 0.0)
            clock.end(0.001)
        node = cast("Any", SimpleNamespace(executor=SimpleNamespace(clock=clock)))

        async def stuck() -> None:
            said.append("not serving")

        clock.begin(1, time.monotonic() - 1000.0)
        with pytest.raises(Bug, match="makes no progress: a step of 1 tokens has run for 1000"):
            await Health(node, notifier, stuck, LOG).watch()
        received = listener.receive()
        assert received is not None
        assert (said, received[1]) == (["not serving"], {"WATCHDOG": "trigger"})
        notifier.close()
        listener.close()

    asyncio.run(run())


def test_a_peer_is_silent_after_so_many_looks_without_a_word() -> None:
    silence = Silence()
    for _ in range(3):
        silence.heard()
        assert [silence.look() for _ in range(LOOKS)] == [False] * LOOKS  # the first one was under way
    assert silence.look()


def test_calls_run_in_order_on_one_thread_and_raise_what_they_raise() -> None:
    async def run() -> None:
        seen: list[int] = []
        thread = ForwardThread(lambda: seen.append(0))
        names = [await thread.call(lambda: threading.current_thread().name) for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        assert await thread.call(lambda: seen[-1]) == 0
        await thread.close()
        assert names == ["forward", "forward"]

    asyncio.run(run())


def test_a_thread_that_cannot_be_prepared_fails_every_call() -> None:
    async def run() -> None:
        thread = ForwardThread(lambda: 1 // 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await thread.call(int)
        await thread.close()

    asyncio.run(run())


def test_a_call_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CLOSE_S", 0.01)
    go_on = threading.Event()

    async def run() -> None:
        thread = ForwardThread(int)
        hangs = asyncio.ensure_future(thread.call(go_on.wait))
        hangs.cancel()
        await thread.close()
        assert not go_on.is_set()

    asyncio.run(run())
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "forward":
            thread.join()
