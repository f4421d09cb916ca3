"""More requests at once than a mesh can run or let wait: the surplus is refused at once, the rest is answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagemesh.shared.errors import Exhausted, StagemeshError
from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.resident import forget_peak, peak_mib, rss_mib
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import Scrape, scrape_after
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
PROMPT_TOKENS, NEW_TOKENS, VOCAB = 24, 12, 320
REFUSAL_BOUND_S = 0.1
MOST_GROWTH_MIB = 200.0  # of a process; the router has an open call for each request while they are refused


@dataclass(frozen=True, slots=True)
class Flood:
    """`count` requests at once, against a mesh that runs `running` and lets `waiting` wait."""

    count: int
    running: int
    waiting: int


SMALL = Flood(count=400, running=16, waiting=40)
LARGE = Flood(count=5000, running=64, waiting=256)


@dataclass(slots=True)
class Flooded:
    """What came of each request, what the router counted, and resident MiB before and at most, by process."""

    answers: list[Answer]
    refusals: list[Exhausted]
    router: Scrape
    memory: dict[str, tuple[float, float]]


@contextmanager
def flooded_mesh(tmp_path: Path, flood: Flood) -> Iterator[RunningMesh]:
    model = make_tiny(tmp_path / "model", num_layers=4, max_context=64)
    sizes = ["--page-size", "8", "--chunk-size", "64", "--num-pages", str(8 * flood.running)]
    options = ["--model", str(model), "--dtype", "float64", *sizes, "--max-running", str(flood.running)]
    environ = {"STAGEMESH_ROUTER__MAX_WAITING_REQUESTS": str(flood.waiting)}
    with running_mesh(tmp_path, *options, environ=environ) as mesh:
        yield mesh


async def ask(client: Client, prompt: list[int]) -> Answer | StagemeshError:
    try:
        return await generate(client, token_request(prompt, NEW_TOKENS, ignore_eos=True))
    except StagemeshError as error:
        return error


async def pour(mesh: RunningMesh, flood: Flood) -> Flooded:
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(flood.count)]
    watched = {name: mesh.pids[name] for name in ("router", "prefill-0/0", "decode-0/0")}
    before = {name: rss_mib(pid) for name, pid in watched.items()}
    for pid in watched.values():
        forget_peak(pid)
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client, prompt)) for prompt in prompts]
    peak = {name: peak_mib(pid) for name, pid in watched.items()}
    await mesh.check_idle()
    outcomes = [task.result() for task in tasks]
    kinds = Counter(type(outcome).__name__ for outcome in outcomes)
    assert set(kinds) == {"Answer", "Exhausted"}, kinds
    (metrics,) = [process["metrics"] for process in mesh.record["processes"] if process["name"] == "router"]
    return Flooded(
        [outcome for outcome in outcomes if isinstance(outcome, Answer)],
        [outcome for outcome in outcomes if isinstance(outcome, Exhausted)],
        await scrape_after(metrics, time.time()),
        {name: (before[name], peak[name]) for name in watched},
    )


def check(flooded: Flooded, flood: Flood) -> None:
    answers, refusals, router = flooded.answers, flooded.refusals, flooded.router
    assert len(answers) >= flood.waiting
    for answer in answers:
        assert answer.reason == "length"
        assert answer.finished is not None
        assert len(answer.token_ids) == answer.finished.usage.completion_tokens == NEW_TOKENS
    assert refusals
    for refusal in refusals:
        assert f"no more than {flood.waiting} requests may wait" in str(refusal)
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s >= 1.0
    ended = {outcome: count for outcome, count in router.of("requests_total", "outcome").items() if count}
    assert ended == {"length": len(answers), "exhausted": len(refusals)}
    assert router.value("refusal_seconds_count") == len(refusals)
    assert sum(router.of("waiting_requests", "reason").values()) == 0
    said = f"{len(answers)} of {flood.count} answered, {len(refusals)} refused"
    seconds = router.value("refusal_seconds_sum") / len(refusals)
    print(f"{said}, {seconds * 1e6:.0f} us each from the handler's start")
    for name, (before, peak) in flooded.memory.items():
        print(f"  {name:>12}: {before:6.1f} MiB before, {peak:6.1f} at most")


def test_a_flood_is_refused_or_answered_and_leaves_nothing(tmp_path: Path) -> None:
    with flooded_mesh(tmp_path, SMALL) as mesh:
        flooded = asyncio.run(pour(mesh, SMALL))
    check(flooded, SMALL)


@pytest.mark.full
def test_five_thousand_at_once_are_refused_within_moments_in_bounded_memory(tmp_path: Path) -> None:
    with flooded_mesh(tmp_path, LARGE) as mesh:
        flooded = asyncio.run(pour(mesh, LARGE))
    check(flooded, LARGE)
    in_time = flooded.router.value("refusal_seconds_bucket", le=str(REFUSAL_BOUND_S))
    assert in_time == len(flooded.refusals)
    for name, (before, peak) in flooded.memory.items():
        assert peak - before < MOST_GROWTH_MIB, name
