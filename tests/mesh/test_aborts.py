"""Aborts, disconnects and deadlines at random moments touch nobody else and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Retryable
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, PAGE, load_reference, prompts
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.reference import check_greedy
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@pytest.fixture(scope="module")
def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    # fewer pages and places than sixty requests want: victims are also caught while they wait
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "300", "--max-running", "12"]
    options = ["--model", str(model), "--dtype", "float64", *sizes]
    with running_mesh(tmp_path_factory.mktemp("aborts"), *options) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Size:
    """`victims` of `requests` are cut short; `concurrency` run at once."""

    requests: int
    victims: int
    concurrency: int


SIXTY = Size(requests=60, victims=30, concurrency=60)
FIVE_HUNDRED = Size(requests=500, victims=167, concurrency=64)


class Storm:
    """A victim's moment comes when all requests together have had so many responses."""

    def __init__(self, client: Client, wanted: list[list[int]], size: Size, seed: int) -> None:
        self._client, self._wanted, self._rng = client, wanted, random.Random(seed)
        self._size, self._places = size, asyncio.Semaphore(size.concurrency)
        self._lengths = [self._rng.randint(1, NEW_TOKENS) for _ in range(size.requests)]
        self._responses = 0
        self._moments: dict[int, Callable[[], None]] = {}
        self.answers: dict[int, Answer] = {}
        self.kinds: dict[int, str] = {}
        self._aborts: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._aborts:
            tasks = [self._aborts.create_task(self._ask(index)) for index in range(self._size.requests)]
            for index in self._rng.sample(range(self._size.requests), self._size.victims):
                kind = self.kinds[index] = self._rng.choice(("abort", "disconnect", "both"))
                self._moments[index] = self._moment(index, kind, tasks[index])
            self._thresholds = {index: self._moment_of(index) for index in self._moments}
            self._strike()

    def _moment_of(self, index: int) -> int:
        """Requests go off about in order: the moment lies around the time when this one is served."""
        responses = sum(self._lengths)
        return int(responses * min(1.0, max(0.0, index / self._size.requests + self._rng.uniform(-0.3, 0.0))))

    def wanted_tokens(self, index: int) -> int:
        return self._lengths[index]

    def _moment(self, index: int, kind: str, task: asyncio.Task[None]) -> Callable[[], None]:
        def strike() -> None:
            if kind in ("abort", "both"):
                assert self._aborts is not None
                self._aborts.create_task(self._abort(index))
            if kind in ("disconnect", "both"):
                task.cancel()

        return strike

    async def _abort(self, index: int) -> None:
        await self._client.call("Abort", generator_pb2.AbortRequest(request_id=f"storm-{index}"), timeout_s=30)

    def _strike(self) -> None:
        for index in [i for i, at in self._thresholds.items() if self._responses >= at]:
            del self._thresholds[index]
            self._moments.pop(index)()

    async def _ask(self, index: int) -> None:
        self.answers[index] = Answer()

        def took(so_far: Answer) -> bool:
            self.answers[index] = so_far
            self._responses += 1
            self._strike()
            return True

        async with self._places:
            prompt, count = self._wanted[index], self._lengths[index]
            request = token_request(prompt, count, ignore_eos=True, request_id=f"storm-{index}")
            self.answers[index] = await generate(self._client, request, on_response=took)


async def storm(mesh: RunningMesh, wanted: list[list[int]], size: Size, seed: int) -> Storm:
    async with Client(mesh.router, GENERATOR) as client:
        blown = Storm(client, wanted, size, seed)
        await blown.run()
    await mesh.check_idle()
    return blown


def check_storm(mesh: RunningMesh, reference: Any, size: Size, seed: int) -> None:
    wanted = prompts(size.requests, reference.config.vocab_size)
    blown = asyncio.run(storm(mesh, wanted, size, seed))
    cut_short = 0
    for index, answer in blown.answers.items():
        check_greedy(reference, wanted[index], answer.token_ids)
        kind = blown.kinds.get(index)
        if kind is None or answer.reason == "length":
            assert len(answer.token_ids) == blown.wanted_tokens(index)
            assert answer.reason == "length"
        else:
            assert answer.reason == "abort" if kind == "abort" else answer.reason in ("", "abort")
            cut_short += 1
    assert cut_short > size.victims // 4, "the storm struck too late to disturb anything"
    said = f"{cut_short} of {size.victims} victims cut short, {size.requests - size.victims} others exact"
    print(f"{size.requests} requests, seed {seed}: {said}")


def test_a_storm_touches_nobody_else_and_leaves_nothing(mesh: RunningMesh, reference: Any) -> None:
    check_storm(mesh, reference, SIXTY, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_storms(mesh: RunningMesh, reference: Any, seed: int) -> None:
    check_storm(mesh, reference, SIXTY, seed)


@pytest.mark.full
def test_a_storm_over_five_hundred_requests(mesh: RunningMesh, reference: Any) -> None:
    check_storm(mesh, reference, FIVE_HUNDRED, seed=1)


def test_a_deadline_ends_the_request_everywhere(mesh: RunningMesh) -> None:
    async def ask() -> None:
        async with Client(mesh.router, GENERATOR) as client:
            request = token_request(range(4, 100), 100, ignore_eos=True)
            with pytest.raises(Retryable, match="Deadline"):
                await generate(client, request, timeout_s=0.1)
        await mesh.check_idle()

    asyncio.run(ask())


def test_one_token_needs_no_decode(mesh: RunningMesh, reference: Any) -> None:
    async def ask() -> Answer:
        async with Client(mesh.router, GENERATOR) as client:
            return await generate(client, token_request(range(4, 60), 1))

    before = asyncio.run(steps(mesh, "decode-0/0"))
    answer = asyncio.run(ask())
    assert answer.reason in ("length", "stop")
    assert check_greedy(reference, list(range(4, 60)), answer.token_ids) == 1
    assert asyncio.run(steps(mesh, "decode-0/0")) == before
    asyncio.run(mesh.check_idle())


async def steps(mesh: RunningMesh, process: str) -> int:
    return int((await mesh.check())[process].gauges["steps_done"])
