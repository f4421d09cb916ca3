"""Every kind of process is killed or stopped, and every kind of link cut, at every phase of a request: each request
ends exactly right or with a true error, none hangs, the loss is acted on in time, and the mesh is whole again. The
table of cases is printed. Then the same without a plan: chaos under steady load."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.runtime.restarts import MAX_FALLS, WITHIN_S
from tests.mesh.test_exact_tiny import CHUNK, PAGE, load_reference, prompts
from tests.mesh.test_recovery import LOST_WITHIN_S
from tests.support.chaos import Chaos, Record
from tests.support.fault_cases import ACTIVATIONS, KV, Blow, Case, Outcome, Phase, Result, table
from tests.support.faults import run_case
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
COUNT, NEW_TOKENS = 32, 32
NUM_PAGES = 80  # of an instance: a third of what its half of the requests want, so that some are retracted
SAMPLE = [
    Case("prefill-1/1", Blow.KILL, Phase.TRANSFER),
    Case(f"prefill-0/1>{KV}", Blow.CUT, Phase.TRANSFER),
    Case("router", Blow.KILL, Phase.DECODING),
    Case("router>decode-1/0", Blow.CUT, Phase.DECODING),
    Case("broker", Blow.KILL, Phase.PREFILL),
    Case("decode-0/1", Blow.STOP, Phase.RETRACTED),
    Case("decode-1/0>decode-1/1", Blow.CUT, Phase.COMMITTED),
    Case("nats", Blow.KILL, Phase.QUEUED),
]
VICTIMS = ("router", "broker", "nats", "prefill-0/0", "prefill-1/1", "decode-0/1", "decode-1/0")
CLIENTS, RIGHT_SHARE, RECOVERED_WITHIN_S = 8, 0.95, 10.0
MEMORY_FLAT = 1.2  # all processes together, at the end against the beginning
REACHED = {
    "prefill": (Phase.QUEUED, Phase.PREFILL, Phase.TRANSFER),
    "decode": (Phase.QUEUED, Phase.TRANSFER, Phase.COMMITTED, Phase.DECODING, Phase.RETRACTED),
}
"""The phases in which stages of a role have a part. Router, broker and bus have one in all."""


def matrix(seed: int) -> list[Case]:
    """All cases once, in an order that spreads each process's over the whole, so that few of them have to wait."""
    rng = random.Random(seed)
    sides = iter([side for _ in range(len(Phase) * 20) for side in rng.sample((0, 1), 2)])  # as often one as the other
    blows = (Blow.KILL, Blow.STOP)
    cases = [Case(victim, *each) for victim in ("router", "broker", "nats") for each in product(blows, Phase)]
    for role, phases in REACHED.items():
        for rank, blow, phase in product((0, 1), blows, phases):
            cases.append(Case(f"{role}-{next(sides)}/{rank}", blow, phase))
        for phase in phases:
            at = next(sides)
            links = [f"{role}-{at}/{rank}>{role}-{at}/{1 - rank}" for rank in (0, 1)]
            links += [f"{role}-{at}/0>broker", f"router>{role}-{at}/0", f"{role}-{at}/0>{ACTIVATIONS}"]
            cases += [Case(link, Blow.CUT, phase) for link in links]
    for rank, phase in ((0, Phase.PREFILL), (1, Phase.PREFILL), (1, Phase.TRANSFER)):
        cases.append(Case(f"prefill-{next(sides)}/{rank}>{KV}", Blow.CUT, phase))
    cases += [Case("router>broker", Blow.CUT, phase) for phase in Phase]
    return spread(cases, rng)


def spread(cases: Sequence[Case], rng: random.Random) -> list[Case]:
    """Those of one group at equal distances."""
    groups: dict[str, list[Case]] = {}
    for case in rng.sample(cases, len(cases)):
        groups.setdefault(case.group, []).append(case)
    places = [((at + rng.random() / 2) / len(all_), case) for all_ in groups.values() for at, case in enumerate(all_)]
    return [case for _, case in sorted(places, key=lambda place: place[0])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@contextmanager
def pressed_mesh(tmp_path: Path, model: Path) -> Iterator[RunningMesh]:
    """Two and two instances of two stages, whose decode side admits more than it has pages for."""
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", str(NUM_PAGES), "--max-running", "32"]
    options = [
        "--model",
        str(model),
        "--dtype",
        "float64",
        *sizes,
        "--prefill-instances",
        "2",
        "--decode-instances",
        "2",
    ]
    environ = {"STAGEMESH_ENGINE__DRAIN_TIMEOUT_S": "5", "STAGEMESH_ENGINE__SCHEDULE_CONSERVATIVENESS": "0.1"}
    with running_mesh(tmp_path, *options, environ=environ, module="tests.support.slow_writes_mesh") as mesh:
        asyncio.run(mesh.until_instances(4))
        yield mesh


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningMesh]:
    with pressed_mesh(tmp_path_factory.mktemp("mesh"), model) as mesh:
        yield mesh


async def run_cases(mesh: RunningMesh, reference: Any, cases: Sequence[Case], seed: int) -> list[Result]:
    """One after the other; each finds the mesh whole."""
    results, wanted, falls = [], prompts(COUNT, reference.config.vocab_size), Falls()
    for number, case in enumerate(cases):
        random.Random(f"{seed}/{number}").shuffle(wanted)
        await asyncio.sleep(falls.pause_s(case.group, time.monotonic()))
        results.append(await run_case(mesh, case, reference, wanted, NEW_TOKENS))
        if case.is_loss or results[-1].renewed:
            falls.note(case.group, time.monotonic())
        print(results[-1].row(), flush=True)
    return results


class Falls:
    """When each group was started again: `up` gives a mesh up of which one falls too often in too short a time, as fast
    hosts get through the cases."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_FALLS - 1))

    def note(self, group: str, now_s: float) -> None:
        self._ends[group].append(now_s)

    def pause_s(self, group: str, now_s: float) -> float:
        """Until it may fall once more."""
        ends = self._ends[group]
        return max(0.0, ends[0] + WITHIN_S - now_s) if len(ends) == MAX_FALLS - 1 else 0.0


def check(results: Sequence[Result]) -> None:
    print(f"\n{table(results)}")
    for result in results:
        check_one(result)


def check_one(result: Result) -> None:
    assert result.hit, f"{result.case}: no request was ever in that phase"
    assert not result.outcomes[Outcome.WRONG], result.case
    assert not result.outcomes[Outcome.HANG], result.case
    if result.case.victim != "router":  # nobody else needs to hear of it
        assert result.outcomes == {Outcome.EXACT: COUNT}, result.case
    if result.case.target != ACTIVATIONS:  # such a connection may have been cut when it was not used any more
        assert (result.acted_s is not None) == result.case.is_loss, result.case
    assert result.acted_s is None or result.acted_s < LOST_WITHIN_S, result.case


def test_a_sample_of_faults(shared_mesh: RunningMesh, reference: Any) -> None:
    check(asyncio.run(run_cases(shared_mesh, reference, SAMPLE, 0)))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_every_fault(tmp_path: Path, model: Path, reference: Any, seed: int) -> None:
    with pressed_mesh(tmp_path, model) as mesh:
        check(asyncio.run(run_cases(mesh, reference, matrix(seed), seed)))


async def run_chaos(mesh: RunningMesh, reference: Any, duration_s: float, period_s: float, seed: int) -> Record:
    """At the end nothing is held."""
    wanted = prompts(COUNT, reference.config.vocab_size)
    record = await Chaos(mesh, wanted, NEW_TOKENS, CLIENTS).run(VICTIMS, duration_s, period_s, seed)
    record.judge(reference, wanted, NEW_TOKENS)
    print("\n" + "\n".join(record.text()))
    assert not record.outcomes[Outcome.WRONG] + record.aside[Outcome.WRONG]
    assert not record.outcomes[Outcome.HANG] + record.aside[Outcome.HANG]
    assert record.right_share >= RIGHT_SHARE
    assert record.rss_mib[-1] < MEMORY_FLAT * record.rss_mib[0]
    await mesh.check_idle()
    return record


def test_chaos(shared_mesh: RunningMesh, reference: Any) -> None:
    """Each kind of process dies once."""
    asyncio.run(run_chaos(shared_mesh, reference, duration_s=28.0, period_s=3.5, seed=0))


@pytest.mark.full
def test_ten_minutes_of_chaos(tmp_path: Path, model: Path, reference: Any) -> None:
    with pressed_mesh(tmp_path, model) as mesh:
        record = asyncio.run(run_chaos(mesh, reference, duration_s=600.0, period_s=30.0, seed=1))
    assert all(record.recovery_s(kill) < RECOVERED_WITHIN_S for kill in record.kills)
