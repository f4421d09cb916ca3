"""Structures are compiled by a process that is bounded, killed, started again, and gone in the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.engine import structure_worker
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.structure_worker import Limits
from stagemesh.shared.errors import Exhausted, Rejected, Retryable, StagemeshError
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage import structures
from stagemesh.shared.stage.structures import Structures
from tests.support.mesh import wait_gone
from tests.support.tiny_models import make_tiny

LIMIT_S = 120.0
GOOD, OTHER = Structure("regex", "[a-z]{1,9}"), Structure("ebnf", 'root ::= "yes" | "no"')
LONG = Structure("regex", "([a-z]{1,900}[0-9]{1,900}x){1,900}|" * 9 + "y")
DEEP = Structure("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000)
Work = Callable[[Structures, StageRunner], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=1)


def run(model: Path, work: Work) -> None:
    """`work` on the structures of a last stage; their process is gone at the end."""

    async def go() -> None:
        runner, tasks = cast("StageRunner", SimpleNamespace(grammars=None)), Tasks()
        made = Structures(runner, str(model), tasks.spawn, Log(logging.getLogger(__name__)))
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            children = [group.create_task(child) for child in (tasks.run(), made.run())]
            await work(made, runner)
            pid = made.worker_pid
            await made.close()
            assert len(tasks) == 0
            for child in children:
                child.cancel()
        if pid is not None:
            wait_gone([pid])

    asyncio.run(go())


def test_what_has_been_prepared_can_be_joined_with_and_is_compiled_once(model: Path) -> None:
    async def work(made: Structures, runner: StageRunner) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(made.prepare(GOOD))
            group.create_task(made.prepare(OTHER))
        await made.prepare(GOOD)
        assert made.compiled == 2
        assert runner.grammars is not None
        assert GOOD in runner.grammars
        assert runner.grammars.matcher(OTHER).mask().any()
        with pytest.raises(Rejected, match="regex: Regex parsing error"):
            await made.prepare(Structure("regex", "([a-z"))
        assert made.refused == 1

    run(model, work)


def test_what_takes_too_much_is_refused_and_holds_nobody_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "COMPILE_S", 0.5)
    monkeypatch.setattr(structures, "COMPILE_BYTES", 256 << 20)

    async def refused(made: Structures, structure: Structure, problem: str) -> None:
        with pytest.raises(Rejected, match=problem) as caught:
            await made.prepare(structure)
        assert caught.value.field == structure.kind

    async def work(made: Structures, runner: StageRunner) -> None:
        await made.prepare(GOOD)
        pid = made.worker_pid
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(made, LONG, "takes longer to compile than 0.5 s|takes more to compile"))
            group.create_task(refused(made, DEEP, "[Nn]est"))
            group.create_task(made.prepare(OTHER))
        assert made.worker_pid == pid, "it outlives what it compiles"

    run(model, work)


def test_a_worker_that_is_killed_is_started_again(model: Path) -> None:
    async def work(made: Structures, runner: StageRunner) -> None:
        await made.prepare(GOOD)
        first = made.worker_pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        waiting = asyncio.create_task(made.prepare(OTHER))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(Retryable, match="has ended"):
            await waiting
        await made.prepare(OTHER)
        assert made.worker_pid != first

    run(model, work)


def test_a_worker_whose_pipe_is_closed_already_is_started_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(data: bytes) -> None:  # as uvloop says it
        raise RuntimeError("unable to perform operation on <WriteUnixTransport closed=True>; the handler is closed")

    async def work(made: Structures, runner: StageRunner) -> None:
        await made.prepare(GOOD)
        worker = made._worker
        assert worker is not None
        stdin = worker._process.stdin
        assert stdin is not None
        monkeypatch.setattr(stdin, "write", closed)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(Retryable, match="has ended"):
            await made.prepare(OTHER)
        await made.prepare(OTHER)
        assert made._worker is not worker

    run(model, work)


def test_no_more_wait_than_may(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "MAX_WAITING", 3)

    async def work(made: Structures, runner: StageRunner) -> None:
        wanted = [made.prepare(Structure("regex", "a" * count)) for count in range(1, 6)]
        results: list[Any] = []
        async with asyncio.TaskGroup() as group:
            for each in wanted:
                group.create_task(_note(each, results))
        assert sum(isinstance(result, Exhausted) for result in results) == 2
        assert results.count(None) == 3

    run(model, work)


async def _note(work: Awaitable[None], results: list[Any]) -> None:
    try:
        await work
    except Exhausted as error:
        results.append(error)
    else:
        results.append(None)


def fork_under(limits: Limits, work: Callable[[], object]) -> int:
    """How a child that does `work` under the limits ends: its wait status."""
    pid = os.fork()
    if pid == 0:
        structure_worker._limit(limits)
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def spin(seconds: float) -> None:
    """Of a core."""
    while time.thread_time() < seconds:
        pass


def test_a_compilation_is_given_time_of_a_core_not_of_the_clock() -> None:
    """On a host that is busy with other things it takes longer, which is no fault of the structure's."""
    limits = Limits(0.2, 1 << 30)
    assert fork_under(limits, lambda: time.sleep(0.5)) == 0
    assert os.WTERMSIG(fork_under(limits, lambda: spin(time.thread_time() + 5.0))) == signal.SIGPROF
    assert os.WTERMSIG(fork_under(limits, lambda: time.sleep(30.0))) == signal.SIGALRM, "but not for ever"


def test_a_mask_is_given_time_of_a_core_not_of_the_clock(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = structures.vocabulary_of(str(model))
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert structure_worker._compiled(vocabulary, GOOD).startswith(b"+")
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    with pytest.raises(Rejected, match="its masks take longer"):
        structure_worker._compiled(vocabulary, GOOD)


def test_on_a_host_without_time_for_it_a_structure_is_not_refused_for_good(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """What the worker says of such a child, and what the stage makes of it."""
    limits, memory = Limits(0.1, 1 << 30), os.memfd_create("structure")
    pid = os.fork()
    if pid == 0:
        structure_worker._limit(limits)
        time.sleep(30.0)
        os._exit(0)
    structure_worker._finish(structure_worker._Job(1, "regex", pid, memory), limits)
    said = capfdbinary.readouterr().out

    async def go() -> None:
        stdout = asyncio.StreamReader()
        process = SimpleNamespace(stdin=Sink(), stdout=stdout, wait=lambda: asyncio.sleep(0))
        worker = structures.CompilerProcess(cast("Any", process))
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            asked = group.create_task(refusal(worker))
            await asyncio.sleep(0)
            stdout.feed_data(said)
            stdout.feed_eof()
            await worker.read()
        assert isinstance(asked.result(), Retryable)
        assert "the host had no 0.1 s of a core" in str(asked.result())

    asyncio.run(go())


async def refusal(worker: structures.CompilerProcess) -> StagemeshError:
    with pytest.raises(StagemeshError) as caught:
        await worker.compile(GOOD)
    return caught.value


class Sink:
    """Takes everything."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...
