"""Client processes of a benchmark, and its command, against a server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.bench import drive
from stagemesh.shared.bench.client import GENERATOR
from stagemesh.shared.bench.drive import Measurement, measure
from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.workload import Workload, plan
from stagemesh.shared.errors import PeerLost, Retryable
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.server import Server
from tests.support.mesh import ROOT

LIMIT_S = 60.0
VOCAB = 320


class ScriptedGenerator:
    """Answers well, or in one of the wrong ways: by the number of new tokens that is asked for."""

    SHORT, STOPPED, REFUSED, CUT, LYING = 2, 3, 4, 5, 6

    def __init__(self) -> None:
        self.live = self.most_live = 0
        self.prompts: list[tuple[int, ...]] = []
        self.release = asyncio.Event()
        self.release.set()

    async def Generate(  # noqa: N802
        self, request: generator_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generator_pb2.GenerateResponse]:
        self.prompts.append(tuple(request.token_ids.ids))
        assert request.ignore_eos
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            await self.release.wait()
            async for response in self._answer(request, request.max_tokens):
                yield response
        finally:
            self.live -= 1

    async def _answer(
        self, request: generator_pb2.GenerateRequest, wanted: int
    ) -> AsyncIterator[generator_pb2.GenerateResponse]:
        if wanted == self.REFUSED:
            raise Retryable("no instance is there")
        made = wanted - (wanted == self.SHORT)
        for token_id in range(made - 1):
            yield generator_pb2.GenerateResponse(token_ids=[token_id])
        if wanted == self.CUT:
            return
        reason = generator_pb2.FINISH_REASON_STOP if wanted == self.STOPPED else generator_pb2.FINISH_REASON_LENGTH
        usage = generator_pb2.Usage(
            prompt_tokens=len(request.token_ids.ids),
            completion_tokens=made + (wanted == self.LYING),
            cached_tokens=len(request.token_ids.ids) - 1,
        )
        finished = generator_pb2.Finished(finish_reason=reason, usage=usage)
        yield generator_pb2.GenerateResponse(token_ids=[7], finished=finished)

    async def Abort(  # noqa: N802
        self, request: generator_pb2.AbortRequest, context: Any
    ) -> generator_pb2.AbortResponse:
        return generator_pb2.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: generator_pb2.GetModelInfoRequest, context: Any
    ) -> generator_pb2.GetModelInfoResponse:
        return generator_pb2.GetModelInfoResponse(vocab_size=VOCAB, max_request_tokens=100)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".ns"))


async def measured(workload: Workload, generator: ScriptedGenerator, **how: Any) -> Measurement:
    server = Server({GENERATOR: generator})
    address = await server.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(LIMIT_S):
            return await measure(Load(address, workload, **how))
    finally:
        await server.stop()


def test_processes_share_a_workload_and_report_every_request() -> None:
    workload = Workload(23, 12, 20, VOCAB, 0.5, request_rate=500.0, seed=3)

    generator = ScriptedGenerator()
    result = asyncio.run(measured(workload, generator, num_processes=3))
    planned = plan(workload)
    assert sorted(generator.prompts) == sorted(tuple(request.token_ids.tolist()) for request in planned)
    for request, made in zip(planned, result.records, strict=True):
        assert (made.index, made.failure) == (request.index, "")
        assert made.output_tokens == made.wanted_tokens == request.output_tokens
        assert made.message_tokens == (1,) * request.output_tokens
        assert made.cached_tokens == made.input_tokens - 1
        assert made.arrival_s <= made.sent_s <= made.message_s[0] <= made.message_s[-1] <= made.end_s


def test_no_failure_looks_like_a_success() -> None:
    script = ScriptedGenerator
    expected = {
        script.SHORT: ("fewer tokens received than asked for", 1),
        script.STOPPED: ("ended with finish_reason stop", 3),
        script.REFUSED: ("Retryable: ", 0),
        script.CUT: ("the stream ended without its last message", 4),
        script.LYING: ("usage reports another number of tokens than was received", 6),
    }
    workload = Workload(60, 4, max(expected), VOCAB, range_ratio=min(expected) / max(expected))

    async def run() -> Measurement:
        return await measured(workload, script())

    records = asyncio.run(run()).records
    assert {made.wanted_tokens for made in records} == set(expected)
    for made in records:
        says, received = expected[made.wanted_tokens]
        assert made.failure.startswith(says)
        assert made.output_tokens == received


def test_concurrency_is_limited_over_all_processes() -> None:
    async def run() -> tuple[Measurement, int]:
        generator = ScriptedGenerator()
        result = await measured(Workload(20, 4, 8, VOCAB), generator, num_processes=2, max_concurrency=3)
        return result, generator.most_live

    result, most_live = asyncio.run(run())
    assert most_live <= 3
    assert not any(made.failure for made in result.records)
    assert all(made.arrival_s == 0.0 for made in result.records)


def test_a_request_that_takes_too_long_is_a_failure() -> None:
    async def run() -> Measurement:
        generator = ScriptedGenerator()
        generator.release.clear()
        return await measured(Workload(2, 4, 8, VOCAB), generator, timeout_s=0.05)

    assert all("Deadline" in made.failure for made in asyncio.run(run()).records)


def test_a_benchmark_that_is_given_up_leaves_no_client() -> None:
    async def run() -> tuple[list[str], list[str]]:
        generator = ScriptedGenerator()
        generator.release.clear()
        server = Server({GENERATOR: generator})
        load = Load(await server.start("127.0.0.1:0"), Workload(4, 4, 8, VOCAB), 2)
        shown = asyncio.Event()
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            task = group.create_task(measure(load, lambda _: shown.set()))
            await shown.wait()
            before = client_processes()
            task.cancel()
        await server.stop()
        return before, client_processes()

    before, after = asyncio.run(run())
    assert (len(before), after) == (2, [])


def client_processes() -> list[str]:
    """Command lines of this process's children that are clients of a benchmark."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]
    return [command for command in commands if drive.WORKER in command]


def test_a_client_process_that_ends_early_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "WORKER", "stagemesh.no_such_module")
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(measure(Load("127.0.0.1:1", Workload(1, 1, 1, VOCAB))))
    assert caught.group_contains(PeerLost, match="a client process ended with status 1")


async def commanded(generator: ScriptedGenerator, *arguments: str) -> tuple[int, str, str]:
    """`stagemesh bench` with `arguments`: its status, stdout and stderr."""
    server = Server({GENERATOR: generator})
    address = await server.start("127.0.0.1:0")
    command = ("-m", "stagemesh.shared.cli.main", "bench", "--router", address, *arguments)
    pipe = asyncio.subprocess.PIPE
    try:
        async with asyncio.timeout(LIMIT_S):
            process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
            out, err = await process.communicate()
    finally:
        await server.stop()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_the_command_prints_the_figures_and_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ("--num-prompts", "6", "--input-len", "5", "--output-len", "9", "--processes", "2", "--json", str(path))
    code, out, err = asyncio.run(commanded(ScriptedGenerator(), *options))
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert ["Successful", "requests", "6"] in lines
    assert ["Output", "tokens", "54"] in lines
    assert "6/6" in err
    said = json.loads(path.read_bytes())
    assert (said["summary"]["successful"], said["client"]["processes"], len(said["requests"])) == (6, 2, 6)


def test_the_command_fails_if_a_request_does() -> None:
    options = ("--num-prompts", "3", "--input-len", "5", "--output-len", str(ScriptedGenerator.STOPPED))
    code, out, _ = asyncio.run(commanded(ScriptedGenerator(), *options))
    assert code == 1
    assert "       3 x ended with finish_reason stop" in out.splitlines()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--output-len", "96"), "input_len: 5 and 96 new tokens are more than a request may have"),
        (("--output-len", "9", "--request-rate", "0"), "request_rate: must be above 0, or inf, got 0.0"),
        (("--output-len", "9", "--processes", "4", "--max-concurrency", "3"), "--max-concurrency: must be at least"),
        (("--output-len", "9", "--json", "/no/such/place"), "--json: its directory /no/such does not exist"),
    ],
)
def test_the_command_refuses_what_cannot_be(options: tuple[str, ...], says: str) -> None:
    generator = ScriptedGenerator()
    code, out, err = asyncio.run(commanded(generator, "--num-prompts", "5", "--input-len", "5", *options))
    assert (code, out, generator.prompts) == (2, "", [])
    assert says in err
