"""Stages are killed while they work: every request is answered exactly, and a restarted instance rejoins."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Retryable
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, PAGE, load_reference, prompts
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.reference import check_greedy
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
COUNT, NEW_TOKENS = 40, 40
LOST_WITHIN_S = 3.0
STAGES = ["prefill-0/0", "prefill-1/1", "decode-0/0", "decode-1/1"]


@dataclass(frozen=True, slots=True)
class Strike:
    """`victim` gets the signal when all requests together have had that share of their tokens."""

    victim: str
    share: float
    number: signal.Signals = signal.SIGKILL

    @property
    def instance(self) -> str:
        return self.victim.partition("/")[0]


# queued or in a prefill chunk, mid-transfer, decoding
EACH = [Strike(victim, share) for victim, share in zip(STAGES, (0.0, 0.05, 0.3, 0.6), strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@contextmanager
def mesh_of(tmp_path: Path, model: Path, num_instances: int, *more: str, **run: Any) -> Iterator[RunningMesh]:
    """Pipelines of two stages, unless `more` says otherwise. `run` is for `running_mesh`."""
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "400", "--max-running", "16"]
    instances = ["--prefill-instances", str(num_instances), "--decode-instances", str(num_instances)]
    options = ["--model", str(model), "--dtype", "float64", *sizes, *instances, *more]
    environ = {"STAGEMESH_ENGINE__DRAIN_TIMEOUT_S": "5", "STAGEMESH_NATS__CONNECT_TIMEOUT_S": "1"}
    environ |= run.pop("environ", {})
    with running_mesh(tmp_path, *options, environ=environ, **run) as mesh:
        asyncio.run(mesh.until_instances(2 * num_instances))
        yield mesh


class Load:
    """Requests that all arrive at once; one strike at their instances."""

    def __init__(self, mesh: RunningMesh, wanted: list[list[int]], strike: Strike) -> None:
        self._mesh, self._wanted, self._strike = mesh, wanted, strike
        self._tokens = [0] * len(wanted)
        self.struck = asyncio.Event()

    async def run(self) -> list[Answer]:
        async with Client(self._mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(client, at)) for at in range(len(self._wanted))]
        return [task.result() for task in tasks]

    async def _ask(self, client: Client, at: int) -> Answer:
        def took(so_far: Answer) -> bool:
            self._tokens[at] = len(so_far.token_ids)
            if not self.struck.is_set() and sum(self._tokens) >= self._strike.share * len(self._wanted) * NEW_TOKENS:
                self.struck.set()
                os.kill(self._mesh.pids[self._strike.victim], self._strike.number)
            return True

        request = token_request(self._wanted[at], NEW_TOKENS, ignore_eos=True)
        return await generate(client, request, on_response=took)


def check_answers(reference: Any, wanted: list[list[int]], answers: list[Answer]) -> None:
    compared = 0
    for prompt, answer in zip(wanted, answers, strict=True):
        compared += check_greedy(reference, prompt, answer.token_ids)
        assert answer.finished is not None
        assert (answer.reason, len(answer.token_ids)) == ("length", NEW_TOKENS)
        usage = answer.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), NEW_TOKENS)
    assert compared > 0.9 * NEW_TOKENS * len(wanted), "near ties everywhere: the comparison says nothing"


async def strike(mesh: RunningMesh, reference: Any, blow: Strike, seed: int, start: int) -> None:
    """Its load is answered exactly by the others; the instance, which dies as one, comes back, and nobody else."""
    wanted, before = prompts(COUNT, reference.config.vocab_size), mesh.pids
    random.Random(seed).shuffle(wanted)
    load = Load(mesh, wanted, blow)
    answers = await load.run()
    assert load.struck.is_set()
    check_answers(reference, wanted, answers)
    await mesh.until_back(blow.instance, start)
    await mesh.until_instances(4)
    changed = {name for name, pid in mesh.pids.items() if before[name] != pid}
    assert changed == {f"{blow.instance}/{rank}" for rank in (0, 1)}
    await mesh.check_idle()
    print(f"{blow.victim} at {blow.share:.2f}, seed {seed}: {COUNT} exact")


def run_strikes(mesh: RunningMesh, reference: Any, strikes: list[tuple[Strike, int]]) -> None:
    starts: Counter[str] = Counter()
    for blow, seed in strikes:
        starts[blow.instance] += 1
        asyncio.run(strike(mesh, reference, blow, seed, starts[blow.instance] + 1))


def test_every_request_outlives_any_one_stage(tmp_path: Path, model: Path, reference: Any) -> None:
    with mesh_of(tmp_path, model, 2) as mesh:
        run_strikes(mesh, reference, [(blow, 1) for blow in EACH])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_at_any_phase(tmp_path: Path, model: Path, reference: Any, seed: int) -> None:
    rng = random.Random(seed)
    victims = [f"{role}-{rng.randrange(2)}/{rank}" for role in ("prefill", "decode") for rank in (0, 1)]
    rng.shuffle(victims)
    with mesh_of(tmp_path, model, 2) as mesh:
        run_strikes(mesh, reference, [(Strike(victim, rng.random() ** 2 * 0.9), seed) for victim in victims])


def test_with_no_other_instance_a_request_ends_soon_and_truly(tmp_path: Path, model: Path) -> None:
    """The next one waits until the instance is back. The router and the bus are started again too."""

    async def run(mesh: RunningMesh) -> None:
        killed_s = 0.0

        def took(so_far: Answer) -> bool:
            nonlocal killed_s
            if not killed_s:
                killed_s = time.monotonic()
                os.kill(mesh.pids["decode-0/1"], signal.SIGKILL)
            return True

        request = token_request(range(4, 20), 200, ignore_eos=True)
        async with Client(mesh.router, GENERATOR) as client:
            with pytest.raises(Retryable, match=r"decode-0 is lost: .*no decode instance is there"):
                await generate(client, request, on_response=took)
        assert time.monotonic() - killed_s < LOST_WITHIN_S
        for name in ("nats", "router"):
            os.kill(mesh.pids[name], signal.SIGKILL)
            await mesh.until_back(name)
        await mesh.until_back("decode-0")
        await mesh.until_instances(2)
        async with Client(mesh.router, GENERATOR) as client:
            assert (await generate(client, request)).reason == "length"

    with mesh_of(tmp_path, model, 1) as mesh:
        asyncio.run(run(mesh))
