"""Decode with an eighth of the pages that its requests want, admitting far too many: all are answered, exactly."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.errors import Retryable
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, NUM_LAYERS, PAGE, Shape, load_reference
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.reference import check_greedy
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import Scrape, scrape_after
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
MAX_CONTEXT, MAX_PROMPT = 256, 12
SHORT, LONG = (70, 115), (180, 236)  # bounds of new tokens
PAGE_BYTES = NUM_LAYERS // 2 * 2 * PAGE * 2 * 16 * 8  # of the widest stage of two or three, in float64
SHARE = 8  # of what all requests want together, the pool holds one in so many parts
TWO_AND_TWO = Shape(2, 2)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def pool_pages(self) -> int:
        wanted = zip(self.prompts, self.lengths, strict=True)
        return sum(pages_for(len(prompt) + length - 1, PAGE) for prompt, length in wanted) // SHARE


def load_of(count: int, bounds: tuple[int, int], vocab_size: int) -> Load:
    rng = random.Random(3)
    prompts = [[rng.randrange(4, vocab_size) for _ in range(rng.randint(1, MAX_PROMPT))] for _ in range(count)]
    return Load(prompts, [rng.randint(*bounds) for _ in range(count)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=NUM_LAYERS, max_context=MAX_CONTEXT)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@dataclass(frozen=True, slots=True)
class Host:
    """Room for retracted KV, `pools` times the pool, and which ways out of memory pressure must be used then."""

    name: str
    pools: float
    resumes: bool
    recomputes: bool

    def __str__(self) -> str:
        return self.name


AMPLE = Host("host-ample", 8.0, resumes=True, recomputes=False)
HALF = Host("host-half", 0.6, resumes=True, recomputes=True)  # retracted sequences fill up to 1.2 pools
NONE = Host("host-none", 0.0, resumes=False, recomputes=True)


@contextmanager
def pressed_mesh(
    tmp_path: Path, model: Path, load: Load, host: Host, *, shape: Shape = TWO_AND_TWO
) -> Iterator[RunningMesh]:
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", str(load.pool_pages)]
    options = ["--model", str(model), "--dtype", "float64", "--max-running", "256", *sizes, *shape.options]
    environ = {
        "STAGEMESH_ENGINE__SCHEDULE_CONSERVATIVENESS": "0.1",
        "STAGEMESH_ENGINE__HOST_KV_BYTES": str(int(host.pools * load.pool_pages) * PAGE_BYTES),
    }
    with running_mesh(tmp_path, *options, environ=environ) as mesh:
        yield mesh


async def scrape_head(mesh: RunningMesh) -> Scrape:
    """Decode's head, when nothing is in flight any more."""
    await mesh.check_idle()
    (address,) = [p["metrics"] for p in mesh.record["processes"] if p["name"] == "decode-0/0"]
    return await scrape_after(address, time.time())


async def ask_all(mesh: RunningMesh, load: Load) -> list[Answer]:
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        wanted = zip(load.prompts, load.lengths, strict=True)
        requests = [token_request(prompt, length, ignore_eos=True) for prompt, length in wanted]
        tasks = [group.create_task(generate(client, request)) for request in requests]
    return [task.result() for task in tasks]


def check_all(mesh: RunningMesh, reference: Any, load: Load) -> Scrape:
    answers = asyncio.run(ask_all(mesh, load))
    told = asyncio.run(scrape_head(mesh))
    compared = 0
    for prompt, length, answer in zip(load.prompts, load.lengths, answers, strict=True):
        compared += check_greedy(reference, prompt, answer.token_ids)
        assert answer.finished is not None
        assert (answer.reason, len(answer.token_ids)) == ("length", length)
        usage = answer.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), length)
    assert compared > 0.9 * sum(load.lengths), "near ties everywhere: the comparison says nothing"
    print(f"{len(answers)} requests, {load.pool_pages} pages, {counted(told)}, {compared} tokens compared")
    return told


def counted(told: Scrape) -> dict[str, int]:
    names = ("retractions", "resumed_sequences", "recomputed_sequences")
    return {name: int(told.value(f"{name}_total")) for name in names}


def check_pressure(tmp_path: Path, model: Path, reference: Any, host: Host, shape: Shape, load: Load) -> int:
    """Returns how often sequences had to make room."""
    with pressed_mesh(tmp_path, model, load, host, shape=shape) as mesh:
        counts = counted(check_all(mesh, reference, load))
    assert (counts["resumed_sequences"] > 0) == host.resumes
    assert (counts["recomputed_sequences"] > 0) == host.recomputes
    return counts["retractions"] + counts["recomputed_sequences"]


@pytest.mark.parametrize("host", [AMPLE, HALF, NONE], ids=str)
def test_all_are_answered_exactly_with_an_eighth_of_the_pages(
    tmp_path: Path, model: Path, reference: Any, host: Host
) -> None:
    load = load_of(60, SHORT, reference.config.vocab_size)
    assert check_pressure(tmp_path, model, reference, host, TWO_AND_TWO, load) > 0


@pytest.mark.full
@pytest.mark.parametrize("shape", [TWO_AND_TWO, Shape(3, 2)], ids=str)
@pytest.mark.parametrize("host", [AMPLE, HALF, NONE], ids=str)
def test_three_hundred_are_answered_exactly(
    tmp_path: Path, model: Path, reference: Any, host: Host, shape: Shape
) -> None:
    load = load_of(300, LONG, reference.config.vocab_size)
    assert check_pressure(tmp_path, model, reference, host, shape, load) >= 150


@dataclass(slots=True)
class Storm:
    """Thirty in a hundred requests are cut short: aborted or abandoned when all together have had so many responses, or
    by a deadline."""

    client: Client
    load: Load
    rng: random.Random
    kinds: dict[int, str] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    responses: int = 0
    moments: list[tuple[int, Callable[[], object]]] = field(default_factory=list)  # the next one last

    async def run(self) -> None:
        count = len(self.load.prompts)
        victims = self.rng.sample(range(count), 3 * count // 10)
        self.kinds = {index: self.rng.choice(("abort", "disconnect", "deadline")) for index in victims}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(index)) for index in range(count)]
            for index, kind in self.kinds.items():
                if kind != "deadline":
                    at = int(self.rng.random() * sum(self.load.lengths) / 2)
                    self.moments.append((at, self._moment(group, index, tasks[index], kind)))
            self.moments.sort(key=lambda moment: -moment[0])

    def _moment(
        self, group: asyncio.TaskGroup, index: int, task: asyncio.Task[None], kind: str
    ) -> Callable[[], object]:
        return task.cancel if kind == "disconnect" else lambda: group.create_task(self._abort(index))

    async def _abort(self, index: int) -> None:
        await self.client.call("Abort", generator_pb2.AbortRequest(request_id=f"storm-{index}"), timeout_s=30)

    async def _ask(self, index: int) -> None:
        self.answers[index] = Answer()

        def took(so_far: Answer) -> bool:
            self.answers[index] = so_far
            self.responses += 1
            while self.moments and self.moments[-1][0] <= self.responses:
                self.moments.pop()[1]()
            return True

        prompt, length = self.load.prompts[index], self.load.lengths[index]
        request = token_request(prompt, length, ignore_eos=True, request_id=f"storm-{index}")
        limit_s = self.rng.uniform(0.1, 5.0) if self.kinds.get(index) == "deadline" else 300.0
        try:
            self.answers[index] = await generate(self.client, request, on_response=took, timeout_s=limit_s)
        except Retryable:
            if self.kinds.get(index) != "deadline":
                raise


async def storm(mesh: RunningMesh, load: Load, seed: int) -> tuple[Storm, Scrape]:
    async with Client(mesh.router, GENERATOR) as client:
        blown = Storm(client, load, random.Random(seed))
        await blown.run()
    return blown, await scrape_head(mesh)


def check_storm(mesh: RunningMesh, reference: Any, load: Load, seed: int) -> dict[str, int]:
    blown, told = asyncio.run(storm(mesh, load, seed))
    cut_short = 0
    for index, answer in blown.answers.items():
        check_greedy(reference, load.prompts[index], answer.token_ids)
        if answer.reason == "length":
            assert len(answer.token_ids) == load.lengths[index]
            continue
        assert index in blown.kinds, f"request {index} ended as {answer.reason!r}, and nobody cut it short"
        cut_short += 1
    assert cut_short > len(blown.kinds) // 4, "the storm struck too late to disturb anything"
    print(f"seed {seed}: {cut_short} of {len(blown.kinds)} victims cut short, {counted(told)} since the start")
    return counted(told)


@contextmanager
def stormy_mesh(tmp_path: Path, model: Path, reference: Any) -> Iterator[tuple[RunningMesh, Load]]:
    """Half of the host memory that retracted sequences want."""
    load = load_of(60, SHORT, reference.config.vocab_size)
    with pressed_mesh(tmp_path, model, load, HALF) as mesh:
        yield mesh, load


def test_storms_under_pressure_touch_nobody_else_and_leave_nothing(tmp_path: Path, model: Path, reference: Any) -> None:
    with stormy_mesh(tmp_path, model, reference) as (mesh, load):
        for seed in range(1, 4):
            check_storm(mesh, reference, load, seed)


@pytest.mark.full
def test_fifty_storms_under_pressure(tmp_path: Path, model: Path, reference: Any) -> None:
    with stormy_mesh(tmp_path, model, reference) as (mesh, load):
        counts = [check_storm(mesh, reference, load, seed) for seed in range(4, 54)][-1]
    assert counts["retractions"] > counts["resumed_sequences"] > 500, "nobody was cut short while it was retracted"
    assert counts["recomputed_sequences"] > 30
