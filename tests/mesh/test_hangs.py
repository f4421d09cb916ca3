"""Stages are stopped while they work: their sockets live, they answer nothing, and never end by themselves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import COUNT, LOST_WITHIN_S, STAGES, Load, Strike, check_answers, mesh_of
from tests.support.running import RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
MOMENTS = dict(zip(STAGES, (0.0, 0.05, 0.3, 0.6), strict=True))
"""The share of all tokens that have come when a stage is stopped: in a prefill chunk, mid-transfer, decoding."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


async def until_lost(mesh: RunningMesh, load: Load) -> float:
    """Seconds from the strike to the router's news of it."""
    await load.struck.wait()
    started_s = time.monotonic()
    await mesh.until_instances(3)
    return time.monotonic() - started_s


async def stop_one(mesh: RunningMesh, reference: Any, blow: Strike, start: int) -> None:
    wanted = prompts(COUNT, reference.config.vocab_size)
    load = Load(mesh, wanted, blow)
    async with asyncio.TaskGroup() as group:
        answers, lost_s = group.create_task(load.run()), group.create_task(until_lost(mesh, load))
    print(f"{blow.victim} stopped at {blow.share:.2f}: lost after {lost_s.result():.2f} s")
    assert lost_s.result() < LOST_WITHIN_S
    check_answers(reference, wanted, answers.result())
    await mesh.until_back(blow.instance, start)
    await mesh.until_instances(4)
    await mesh.check_idle()


@pytest.mark.parametrize("victims", [("prefill-1/1", "decode-0/0")], ids=str)
def test_requests_outlive_a_stage_that_hangs(
    tmp_path: Path, model: Path, reference: Any, victims: tuple[str, ...]
) -> None:
    with mesh_of(tmp_path, model, 2) as mesh:
        for victim in victims:
            asyncio.run(stop_one(mesh, reference, Strike(victim, MOMENTS[victim], signal.SIGSTOP), 2))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_requests_outlive_any_stage_that_hangs(tmp_path: Path, model: Path, reference: Any, seed: int) -> None:
    rng = random.Random(seed)
    with mesh_of(tmp_path, model, 2) as mesh:
        for victim in rng.sample(STAGES, len(STAGES)):
            asyncio.run(stop_one(mesh, reference, Strike(victim, rng.random() ** 2 * 0.9, signal.SIGSTOP), 2))


async def resurrect(mesh: RunningMesh, reference: Any, victim: str) -> None:
    """Its instance is lost while it is stopped; then it goes on, in the middle of a prompt's KV."""
    wanted, pid = prompts(COUNT, reference.config.vocab_size), mesh.pids[victim]
    load = Load(mesh, wanted, Strike(victim, 0.05, signal.SIGSTOP))
    async with asyncio.TaskGroup() as group:
        answers = group.create_task(load.run())
        await until_lost(mesh, load)
        os.kill(pid, signal.SIGCONT)
    check_answers(reference, wanted, answers.result())
    await mesh.until_back(victim.partition("/")[0])
    await mesh.until_instances(4)
    await mesh.check_idle()


def test_a_stage_that_comes_back_to_life_learns_that_its_epoch_is_lost_and_ends(
    tmp_path: Path, model: Path, reference: Any
) -> None:
    one_stage = ("--prefill-pp", "1", "--decode-pp", "1")
    with mesh_of(tmp_path, model, 2, *one_stage, module="tests.support.patient_up") as mesh:
        asyncio.run(resurrect(mesh, reference, "prefill-0/0"))
        said = "".join(mesh.output)
    assert "prefill-0/0 exited with status 2" in said, "it ends by itself, nobody has to kill it"
    assert "is lost: it must start again, under a new epoch" in said
