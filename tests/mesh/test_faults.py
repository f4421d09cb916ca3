"""Every kind of process is killed or stopped at every phase of a request: each request ends exactly right or with a
true error, none hangs, the loss is acted on in time, and the mesh is whole again. The table of cases is printed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import LOST_WITHIN_S, mesh_of
from tests.support.faults import Blow, Case, Outcome, Phase, Result, run_case, table
from tests.support.running import RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
COUNT, NEW_TOKENS = 32, 32
BLOWS = (Blow.KILL, Blow.STOP)  # at processes
SAMPLE = [
    Case("prefill-0/0", Blow.KILL, Phase.QUEUED),
    Case("decode-1/1", Blow.KILL, Phase.DECODING),
    Case("prefill-1/1", Blow.KILL, Phase.TRANSFER),
    Case("router", Blow.KILL, Phase.DECODING),
    Case("decode-0/0", Blow.KILL, Phase.COMMITTED),
    Case("prefill-0/1", Blow.STOP, Phase.PREFILL),
]
REACHED = {
    "prefill": (Phase.QUEUED, Phase.PREFILL, Phase.TRANSFER),
    "decode": (Phase.QUEUED, Phase.TRANSFER, Phase.COMMITTED, Phase.DECODING),
    "router": tuple(Phase),
}
"""The phases in which each kind of process has a part."""
LINKS = [
    *(f"{role}-{at}/{rank}>{role}-{at}/{1 - rank}" for role in ("prefill", "decode") for at, rank in ((0, 0), (1, 1))),
    *("router>prefill-0/0", "router>decode-1/0", "prefill-1/0>kv", "prefill-0/1>kv"),
]


def matrix(seed: int) -> list[Case]:
    """All cases once, shuffled, so that no instance falls too often in a minute."""
    rng = random.Random(seed)
    cases = [Case("router", blow, phase) for blow, phase in product(BLOWS, REACHED["router"])]
    for role, rank, blow in product(("prefill", "decode"), (0, 1), BLOWS):
        cases += [Case(f"{role}-{rng.randrange(2)}/{rank}", blow, phase) for phase in REACHED[role]]
    for link in LINKS:
        phases = REACHED[link.partition("-")[0]] if "-" in link.partition(">")[0] else REACHED["router"]
        cases += [Case(link, Blow.CUT, phase) for phase in phases]
    rng.shuffle(cases)
    return cases


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


async def run_cases(mesh: RunningMesh, reference: Any, cases: Sequence[Case], seed: int) -> list[Result]:
    """One after the other; each finds the mesh whole."""
    results, starts = [], Counter[str]()
    wanted = prompts(COUNT, reference.config.vocab_size)
    for number, case in enumerate(cases):
        starts[case.group] += case.is_loss
        random.Random(f"{seed}/{number}").shuffle(wanted)
        result = await run_case(mesh, case, reference, wanted, NEW_TOKENS, start=starts[case.group] + 1)
        result.held = await mesh.check_idle()
        results.append(result)
        print(result.row(), flush=True)
    return results


def check(results: Sequence[Result]) -> None:
    print(f"\n{table(results)}")
    for result in results:
        assert not result.outcomes[Outcome.WRONG], result.case
        assert not result.outcomes[Outcome.HANG], result.case
        if result.case.is_stage:  # there is another instance: nobody needs to hear of it
            assert result.outcomes[Outcome.EXACT] == COUNT, result.case
            assert result.acted_s is not None
            assert result.acted_s < LOST_WITHIN_S, result.case


def test_a_sample_of_faults(tmp_path: Path, model: Path, reference: Any) -> None:
    with mesh_of(tmp_path, model, 2) as mesh:
        check(asyncio.run(run_cases(mesh, reference, SAMPLE, 0)))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_every_fault(tmp_path: Path, model: Path, reference: Any, seed: int) -> None:
    with mesh_of(tmp_path, model, 2) as mesh:
        check(asyncio.run(run_cases(mesh, reference, matrix(seed), seed)))
