"""The life of a service without a process of its own: started, drained, cut off, failed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import PeerLost, Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.drain import CLOSE_GRACE_S
from stagemesh.shared.runtime.exits import EXIT_FAILED, EXIT_REFUSED, report_failure
from stagemesh.shared.runtime.loop import SWITCH_INTERVAL_S, LagSampler, run
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.notify_socket import NotifySocket
from stagemesh.shared.runtime.service import Child, StopSignals, run_service, run_to_end

LIMIT_S = 30.0


class OneRequest:
    """A service with one request in flight, which ends when the test says so."""

    address = "127.0.0.1:7"

    def __init__(self) -> None:
        self.may_start, self.request_done = asyncio.Event(), asyncio.Event()
        self.starting, self.serving, self.withdrawn = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.journal: list[str] = []
        self.child_error: Exception | None = None

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        stack.callback(self.journal.append, "closed")
        group = await stack.enter_async_context(asyncio.TaskGroup())
        helper = group.create_task(asyncio.Event().wait())
        stack.callback(helper.cancel)
        self.starting.set()
        await self.may_start.wait()
        return [self._child()]

    @property
    def held(self) -> Mapping[str, int]:
        return {"requests": int(not self.request_done.is_set()), "tickets": 0}

    async def withdraw(self) -> None:
        self.journal.append("withdrawn")
        self.withdrawn.set()

    async def idle(self) -> None:
        await self.request_done.wait()
        self.journal.append("idle")

    async def _child(self) -> None:
        self.serving.set()
        if self.child_error is not None:
            raise self.child_error
        await asyncio.Event().wait()


def drive(
    service: OneRequest, script: Coroutine[Any, Any, None], signals: StopSignals, drain_timeout_s: float = LIMIT_S
) -> Mapping[str, int] | None:
    async def both() -> Mapping[str, int] | None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(script)
            served = group.create_task(
                run_service(service, drain_timeout_s=drain_timeout_s, notifier=Notifier(None), signals=signals)
            )
        return served.result()

    return run(both())


def test_a_request_in_flight_finishes_before_the_service_closes() -> None:
    service, signals = OneRequest(), StopSignals()

    async def script() -> None:
        await service.serving.wait()
        signals.stop()
        await service.withdrawn.wait()
        service.request_done.set()

    assert drive(service, script(), signals) is None
    assert service.journal == ["withdrawn", "idle", "closed"]


def test_a_collection_does_not_look_at_what_a_service_was_made_of() -> None:
    service, signals = OneRequest(), StopSignals()
    looked_at: list[str] = []

    async def script() -> None:
        await service.serving.wait()
        later = [service.journal]
        seen = gc.get_objects()
        looked_at.extend(name for name, what in (("made", service.journal), ("later", later)) if _among(what, seen))
        service.request_done.set()
        signals.stop()

    try:
        drive(service, script(), signals)
    finally:
        gc.unfreeze()
    assert looked_at == ["later"]


def _among(wanted: object, objects: list[Any]) -> bool:
    return any(each is wanted for each in objects)


def test_a_request_past_the_deadline_is_cut_off() -> None:
    service, signals = OneRequest(), StopSignals()

    async def script() -> None:
        await service.serving.wait()
        signals.stop()

    assert drive(service, script(), signals, drain_timeout_s=0.01) == {"requests": 1}
    assert service.journal == ["withdrawn", "closed"]


def test_a_signal_to_one_that_drains_by_itself_cuts_nothing_off() -> None:
    """A stage whose neighbour leaves drains, and is told to by who started it as well."""
    service, signals = OneRequest(), StopSignals()

    async def script() -> None:
        await service.serving.wait()
        signals.drain.set()
        signals.stop()
        service.request_done.set()

    assert drive(service, script(), signals) is None
    assert service.journal == ["withdrawn", "idle", "closed"]


def test_a_second_signal_cuts_the_drain_off() -> None:
    service, signals = OneRequest(), StopSignals()

    async def script() -> None:
        await service.serving.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await service.withdrawn.wait()
        os.kill(os.getpid(), signal.SIGINT)

    assert drive(service, script(), signals) == {"requests": 1}
    assert service.journal == ["withdrawn", "closed"]


def test_a_signal_while_starting_undoes_the_start() -> None:
    service, signals = OneRequest(), StopSignals()
    service.may_start.clear()

    async def script() -> None:
        await service.starting.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    assert drive(service, script(), signals) is None
    assert service.journal == ["closed"]


def test_a_child_that_fails_takes_the_service_down() -> None:
    service = OneRequest()
    service.child_error = PeerLost("stage 1 is gone")

    async def script() -> None:
        pass

    with pytest.raises(ExceptionGroup) as caught:
        drive(service, script(), StopSignals())
    assert caught.value.subgroup(PeerLost) is not None
    assert service.journal == ["closed"]


def test_the_supervisor_is_told_of_ready_and_stopping(tmp_path: Path) -> None:
    service, signals = OneRequest(), StopSignals()
    service.request_done.set()
    signals.stop()  # comes before the start is over, and waits for it: nothing in it suspends
    listener = NotifySocket(tmp_path / "notify.sock")
    notifier = Notifier(str(listener.path))
    assert run(run_service(service, drain_timeout_s=LIMIT_S, notifier=notifier, signals=signals)) is None
    told = [received[1] for received in iter(listener.receive, None) if received]
    notifier.close()
    listener.close()
    stopping = {
        "STOPPING": "1",
        "STATUS": "draining",
        "EXTEND_TIMEOUT_USEC": str(round((LIMIT_S + CLOSE_GRACE_S) * 1e6)),
    }
    assert told == [{"READY": "1", "STATUS": "serving", "X_ADDRESS": "127.0.0.1:7"}, stopping]


def test_the_supervisor_hears_that_the_loop_runs_while_the_service_starts(tmp_path: Path) -> None:
    service, signals, beats = OneRequest(), StopSignals(), 0
    service.may_start.clear()
    listener = NotifySocket(tmp_path / "notify.sock")
    notifier = Notifier(str(listener.path), watchdog_timeout_s=0.01)

    async def script() -> None:
        nonlocal beats
        while beats < 3:
            await asyncio.sleep(0)
            beats += (received := listener.receive()) is not None and received[1] == {"WATCHDOG": "1"}
        signals.stop()

    async def both() -> None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(script())
            group.create_task(run_service(service, drain_timeout_s=LIMIT_S, notifier=notifier, signals=signals))

    run(both())
    notifier.close()
    listener.close()
    assert service.journal == ["closed"]


def test_what_is_cut_off_is_said_and_makes_the_exit_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service, signals = OneRequest(), StopSignals()
    signals.stop()
    listener = NotifySocket(tmp_path / "notify.sock")
    notifier, log = Notifier(str(listener.path)), Log(logging.getLogger("router"))
    with pytest.raises(SystemExit) as ended:
        run_to_end(service, drain_timeout_s=0.01, notifier=notifier, log=log, signals=signals)
    assert ended.value.code == EXIT_FAILED
    told = [received[1] for received in iter(listener.receive, None) if received]
    notifier.close()
    listener.close()
    assert told[-1] == {"STATUS": "cut off: requests 1"}
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["fields"]) == ("work was cut off", {"requests": 1})


def test_run_uses_uvloop_and_short_thread_switches() -> None:
    before = sys.getswitchinterval()

    async def loop_module() -> str:
        return type(asyncio.get_running_loop()).__module__

    try:
        assert run(loop_module()).startswith("uvloop")
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before)


def test_the_lag_sampler_sorts_what_it_is_given_and_forgets_the_maximum_on_request() -> None:
    sampler = LagSampler()
    for lag_s in (0.0, 0.001, 0.0011, 0.3, 7.0):
        sampler.record(lag_s)
    counts = dict(sampler.histogram)
    assert (counts[0.001], counts[0.002], counts[0.5], counts[float("inf")]) == (2, 1, 1, 1)
    assert sampler.num_samples == sum(counts.values()) == 5
    assert (sampler.reset_max(), sampler.max_lag_s) == (7.0, 0.0)


def test_the_lag_sampler_samples_a_running_loop() -> None:
    sampled = asyncio.Event()

    class Told(LagSampler):
        def record(self, lag_s: float) -> None:
            super().record(lag_s)
            sampled.set()

    async def until_sampled() -> LagSampler:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            sampler = Told(interval_s=0.001)
            task = group.create_task(sampler.run())
            await sampled.wait()
            task.cancel()
        return sampler

    assert asyncio.run(until_sampled()).num_samples >= 1


def test_a_failure_is_a_line_for_what_we_raise_and_a_traceback_for_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    refused = ExceptionGroup("start", [Rejected("memory", "too little")])
    assert report_failure(refused) == EXIT_REFUSED
    assert capsys.readouterr().err == "error: memory: too little\n"
    assert report_failure(ExceptionGroup("start", [refused, ValueError("odd")])) == EXIT_FAILED
    said = capsys.readouterr().err
    assert "error: memory: too little\n" in said
    assert "ValueError: odd" in said
