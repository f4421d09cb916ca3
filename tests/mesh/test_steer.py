"""What operators change while a mesh runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.mesh import ROOT
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
ENVIRON = {**os.environ, "PYTHONPATH": ".ns"}
PROMPT = [(7 * n) % 300 + 4 for n in range(100)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=4, max_context=256)
    sizes = ["--page-size", "8", "--chunk-size", "32", "--num-pages", "100"]
    with running_mesh(tmp_path_factory.mktemp("steer"), "--model", str(path), *sizes) as running:
        yield running


def command(mesh: RunningMesh, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "stagemesh.shared.cli.main", *arguments, "--router", mesh.router]


def stagemesh(mesh: RunningMesh, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(mesh, *arguments), cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=60, check=False
    )


async def ask(mesh: RunningMesh) -> Answer:
    async with Client(mesh.router, GENERATOR) as client:
        return await generate(client, token_request(PROMPT, 5, ignore_eos=True))


def test_conservativeness_is_set_and_said(mesh: RunningMesh) -> None:
    first = stagemesh(mesh, "set", "decode-0", "schedule_conservativeness", "0.5")
    second = stagemesh(mesh, "set", "decode-0", "schedule_conservativeness", "2")
    assert (first.returncode, first.stdout) == (0, "decode-0: schedule_conservativeness 1 -> 0.5\n"), first.stderr
    assert (second.returncode, second.stdout) == (0, "decode-0: schedule_conservativeness 0.5 -> 2\n"), second.stderr
    assert len(asyncio.run(ask(mesh)).token_ids) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "decode-0", "schedule_conservativeness", "11"), "schedule_conservativeness: must be in 0..10"),
        (("set", "decode-0", "max_running", "-3"), "max_running: must be a whole number in 1..64"),
        (("set", "decode-0", "chunk_size", "1"), "setting: must be one of schedule_conservativeness"),
        (("set", "decode-1", "chunk_size", "1"), "no instance is named 'decode-1'; there are decode-0, prefill-0"),
        (("flush-cache", "decode-0"), "instance: decode instances cache no prompts"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(mesh: RunningMesh, arguments: tuple[str, ...], message: str) -> None:
    finished = stagemesh(mesh, *arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_flushed_cache_is_empty_and_answers_stay_the_same(mesh: RunningMesh) -> None:
    before = asyncio.run(ask(mesh))
    asyncio.run(mesh.check_idle())
    cached = asyncio.run(mesh.check())["prefill-0/0"].gauges["pages_cached"]
    assert cached == len(PROMPT) // 8
    finished = stagemesh(mesh, "flush-cache", "prefill-0")
    assert (finished.returncode, finished.stdout) == (0, f"prefill-0: {cached} pages evicted\n"), finished.stderr
    assert asyncio.run(mesh.check())["prefill-0/0"].gauges["pages_cached"] == 0
    after = asyncio.run(ask(mesh))
    assert after.finished is not None
    assert after.finished.usage.cached_tokens == 0
    assert after.token_ids == before.token_ids


def test_a_profile_shows_the_forward_passes_of_every_stage(mesh: RunningMesh) -> None:
    """Recorded while the mesh answers."""

    async def ask_meanwhile() -> list[str]:
        recording = await asyncio.create_subprocess_exec(
            *command(mesh, "profile", "decode-0", "--seconds", "2"),
            cwd=ROOT,
            env=ENVIRON,
            stdout=asyncio.subprocess.PIPE,
        )
        reading = asyncio.ensure_future(recording.communicate())
        while not reading.done():
            await ask(mesh)
        said, _ = await reading
        assert recording.returncode == 0
        return said.decode().splitlines()

    lines = asyncio.run(ask_meanwhile())
    assert [line.partition(": ")[0] for line in lines] == ["decode-0/0", "decode-0/1"]
    for line in lines:
        path = Path(line.partition(": ")[2])
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert "aten::index_copy_" in names, "keys and values are written in every forward pass"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "decode-0", "--seconds", "0"), "seconds: must be over 0 and at most 60, got 0"),
        (("profile", "decode-0", "--seconds", "61"), "seconds: must be over 0 and at most 60, got 61"),
        (("profile", "router"), "no instance is named 'router'; there are decode-0, prefill-0"),
    ],
)
def test_what_cannot_be_profiled_is_refused_by_name(
    mesh: RunningMesh, arguments: tuple[str, ...], message: str
) -> None:
    finished = stagemesh(mesh, *arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
