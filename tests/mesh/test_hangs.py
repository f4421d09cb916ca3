"""Stages are stopped while they work: their sockets live, they answer nothing, and never end by themselves."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
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
    print(await mesh.check_idle(but=frozenset({"pages_quarantined", "tickets"})))


def strikes() -> Iterator[Strike]:
    for victim, share in MOMENTS.items():
        yield Strike(victim, share, signal.SIGSTOP)


def test_requests_outlive_any_stage_that_hangs(tmp_path: Path, model: Path, reference: Any) -> None:
    with mesh_of(tmp_path, model, 2) as mesh:
        for blow in strikes():
            asyncio.run(stop_one(mesh, reference, blow, 2))
