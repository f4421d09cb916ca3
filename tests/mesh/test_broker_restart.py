"""The broker is killed under load, at any phase of requests: each of them is answered exactly, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import COUNT, Load, Strike, check_answers, mesh_of
from tests.support.running import RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
SHARES = (0.0, 0.02)  # queued; prompts computed and sent, some committed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


async def strike(mesh: RunningMesh, reference: Any, share: float, seed: int, start: int) -> None:
    """Nobody else is started again, and nothing is taken for lost."""
    wanted, before = prompts(COUNT, reference.config.vocab_size), mesh.pids
    random.Random(seed).shuffle(wanted)
    load = Load(mesh, wanted, Strike("broker", share))
    answers = await load.run()
    assert load.struck
    check_answers(reference, wanted, answers)
    await mesh.until_back("broker", start)
    await mesh.until_instances(4)
    assert {name for name, pid in mesh.pids.items() if before[name] != pid} == {"broker"}
    await mesh.check_idle()
    print(f"broker at {share:.2f}, seed {seed}: {COUNT} exact")


def run_strikes(tmp_path: Path, model: Path, reference: Any, shares: Sequence[float], seed: int) -> None:
    with mesh_of(tmp_path, model, 2) as mesh:
        for at, share in enumerate(shares):
            asyncio.run(strike(mesh, reference, share, seed + at, at + 2))
    said = "".join(mesh.output)
    assert "an instance is gone" not in said.partition("draining")[0]
    assert "a ticket was found again" in said


def test_every_request_outlives_the_broker(tmp_path: Path, model: Path, reference: Any) -> None:
    run_strikes(tmp_path, model, reference, SHARES, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_at_any_phase(tmp_path: Path, model: Path, reference: Any, seed: int) -> None:
    rng = random.Random(seed)
    run_strikes(tmp_path, model, reference, [rng.random() ** 3 * 0.5 for _ in range(3)], seed)


STALL_S = 20.0  # heads give up a stream that is silent for 15 s


@pytest.mark.full
def test_a_broker_that_was_stopped_for_long_takes_nobody_for_lost(tmp_path: Path, model: Path, reference: Any) -> None:
    async def run(mesh: RunningMesh) -> None:
        wanted, before = prompts(COUNT, reference.config.vocab_size), mesh.pids
        load = Load(mesh, wanted, Strike("broker", 0.02, signal.SIGSTOP))
        async with asyncio.TaskGroup() as group:
            answers = group.create_task(load.run())
            await load.struck.wait()
            await asyncio.sleep(STALL_S)  # that it lasts so long is what is tested
            os.kill(before["broker"], signal.SIGCONT)
        check_answers(reference, wanted, answers.result())
        await asyncio.to_thread(mesh.until_said, "this broker has stood still")
        check_answers(reference, wanted, await Load(mesh, wanted, Strike("broker", 2.0)).run())
        await mesh.check_idle()

    environ = {"STAGEMESH_ROUTER__BROKER_WAIT_S": "60"}
    with mesh_of(tmp_path, model, 2, module="tests.support.patient_up", environ=environ) as mesh:
        asyncio.run(run(mesh))
        said = "".join(mesh.output)
    assert "an instance is gone" not in said.partition("draining")[0]
    assert " is back, start " not in said
