"""What a pool that is too small costs, on a tiny model in float64.

    PYTHONPATH=.ns:. python tests/bench/pressure.py [--parts lengths,storm,stress] [--requests 192] [--prompts 256]

lengths: requests that end where nobody could know, by a stop token, on a pool of half of what those want that may run
at once. Throughput at conservativeness 1.0 and 0.1 against an oracle: the same requests on the same pool, but with
the true length as max_tokens, and so high a conservativeness that each is admitted by it (nothing is ever retracted).
storm: decode's sequences in a step under a steady load, before a storm that retracts and from 30 s after it.
stress: 256 prompts at once, 400 in, 800 out, range ratio 0.9, conservativeness 0.1, a pool for a quarter of them.

Exits with 1 if a request does not end with the tokens that it has on an idle mesh, or does not end well.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stagemesh.shared.bench.drive import measure
from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.workload import Workload, plan
from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import scrape_after
from tests.support.tiny_models import make_tiny

PAGE: Final = 16
VOCAB: Final = 320
MAX_NEW: Final = 1024  # what a request says that it may take
SHORTEST, MEAN_MORE = 32, 256  # new tokens that it does take, exponentially distributed
SLACK: Final = 64  # tokens among which one is looked for that can end a request
PROMPT: Final = (48, 96)
RUNNING: Final = 64  # sequences that may run at once
LIMIT_S: Final = 1200.0
ORACLE: Final = 10.0  # of every estimate: more than max_tokens
RECOVERY_S: Final = 30.0
MEASURED_S: Final = 12.0
SETTLE_S: Final = 4.0
ROUNDS: Final = 3
STEADY: Final = 16  # requests at once, before and after the storm


@dataclass(frozen=True, slots=True)
class Case:
    """A request that ends with its `tokens`, the last of which is its stop token. `seed` fixes every draw."""

    prompt: list[int]
    seed: int
    tokens: list[int]

    @property
    def pages(self) -> int:
        return -(-(len(self.prompt) + len(self.tokens)) // PAGE)


@dataclass(slots=True)
class Windows:
    """What decode's head did in some stretches of time, added up."""

    seconds: float = 0.0
    grown: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.grown["decoded_tokens_total"] / self.seconds

    @property
    def rows(self) -> float:
        """Sequences a step."""
        return self.grown["step_rows_sum"] / self.grown["step_rows_count"]

    def row(self, name: str, first: Windows) -> str:
        said = "".join(f" {self.grown[f'{each}_total']:10.0f}" for each in COUNTED)
        return f"{name:>22} {self.rate:9.0f} {self.rate / first.rate:8.2f} {self.rows:10.1f}{said}"


COUNTED: Final = ("retractions", "resumed_sequences", "recomputed_sequences", "reservations_taken_back")
HEADER: Final = (
    f"{'':>22} {'tokens/s':>9} {'/ first':>8} {'rows/step':>10} {'retracted':>10} {'resumed':>10} {'recompute':>10}"
    f" {'taken back':>10}"
)


NAMES: Final = ("decoded_tokens_total", "step_rows_sum", "step_rows_count", *(f"{each}_total" for each in COUNTED))


@asynccontextmanager
async def watched(mesh: RunningMesh, windows: Windows) -> AsyncIterator[None]:
    """Adds what happens in the block."""
    (address,) = [process["metrics"] for process in mesh.record["processes"] if process["name"] == "decode-0/0"]
    first, first_s = await scrape_after(address, time.time()), time.monotonic()
    yield
    last, last_s = await scrape_after(address, time.time()), time.monotonic()
    windows.seconds += last_s - first_s
    windows.grown.update({name: last.value(name) - first.value(name) for name in NAMES})


@asynccontextmanager
async def mesh_of(
    model: Path, *, num_pages: int, max_running: int, conservativeness: float
) -> AsyncIterator[tuple[RunningMesh, Client]]:
    sizes = ["--page-size", str(PAGE), "--chunk-size", "512", "--num-pages", str(num_pages)]
    options = ["--model", str(model), "--dtype", "float64", *sizes, "--max-running", str(max_running)]
    environ = {"STAGEMESH_ENGINE__SCHEDULE_CONSERVATIVENESS": str(conservativeness)}
    with tempfile.TemporaryDirectory() as folder, running_mesh(Path(folder), *options, environ=environ) as mesh:
        async with Client(mesh.router, GENERATOR) as client:
            yield mesh, client
        await mesh.check_idle()


async def ask(client: Client, case: Case, max_tokens: int) -> Answer:
    """Raises SystemExit unless it ends as it should."""
    stop = case.tokens[-1:]
    request = token_request(
        case.prompt, max_tokens, seed=case.seed, temperature=2.0, ignore_eos=True, stop_token_ids=stop, whole=True
    )
    answer = await generate(client, request, timeout_s=LIMIT_S)
    if case.tokens and answer.token_ids != case.tokens:
        raise SystemExit(f"request {case.seed} ended {answer.reason} with {len(answer.token_ids)} tokens, others")
    return answer


async def make_cases(model: Path, count: int) -> list[Case]:
    """Most take far less than they may. A request ends with the token nearest to its length that it has not drawn
    before."""
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(*PROMPT))] for _ in range(count)]
    num_pages = RUNNING * -(-(PROMPT[1] + MAX_NEW) // PAGE)
    async with mesh_of(model, num_pages=num_pages, max_running=RUNNING, conservativeness=ORACLE) as (_, client):
        drawn = [Case(prompt, seed, []) for seed, prompt in enumerate(prompts)]
        wanted = [min(MAX_NEW, round(SHORTEST + rng.expovariate(1 / MEAN_MORE))) for _ in drawn]
        limits = [min(MAX_NEW, length + SLACK) for length in wanted]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(client, case, most)) for case, most in zip(drawn, limits, strict=True)]
    cases = []
    for case, task, length in zip(drawn, tasks, wanted, strict=True):
        tokens = task.result().token_ids
        ends = [at for at, token_id in enumerate(tokens) if token_id not in tokens[:at]]
        end = min(ends, key=lambda at: abs(at + 1 - length))
        cases.append(Case(case.prompt, case.seed, tokens[: end + 1]))
    return cases


async def again_and_again(client: Client, cases: Sequence[Case], *, oracle: bool = False) -> None:
    while True:
        for case in cases:
            await ask(client, case, len(case.tokens) if oracle else MAX_NEW)


def share(cases: Sequence[Case], num_clients: int) -> list[Sequence[Case]]:
    return [cases[at::num_clients] for at in range(num_clients)]


def half_of_wanted(cases: Sequence[Case]) -> int:
    """Pages: of RUNNING requests at their full length."""
    return RUNNING * sum(case.pages for case in cases) // len(cases) // 2


@asynccontextmanager
async def steady(
    client: Client, cases: Sequence[Case], num_clients: int, *, oracle: bool = False
) -> AsyncIterator[None]:
    """Meanwhile, so many clients ask for one after the other."""
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(again_and_again(client, own, oracle=oracle)) for own in share(cases, num_clients)]
        yield
        for task in clients:
            task.cancel()


async def lengths(model: Path, cases: Sequence[Case]) -> None:
    """All three have a mesh of their own and take turns, so that a host's moods meet each of them."""
    tokens, pages = sum(len(case.tokens) for case in cases) // len(cases), half_of_wanted(cases)
    print(f"{RUNNING} requests at once, again and again, of {tokens} new tokens on average that might be {MAX_NEW}")
    print(f"{pages} pages, half of what those want; {ROUNDS} times {MEASURED_S:.0f} s, after one to learn in")
    print(HEADER)
    variants = {"oracle": ORACLE, "conservativeness 1.0": 1.0, "conservativeness 0.1": 0.1}
    async with AsyncExitStack() as stack:
        meshes = {
            name: await stack.enter_async_context(
                mesh_of(model, num_pages=pages, max_running=RUNNING, conservativeness=conservativeness)
            )
            for name, conservativeness in variants.items()
        }
        for number in range(ROUNDS + 1):
            if number <= 1:  # what the first round measured does not count
                results = {name: Windows() for name in variants}
            for name, (mesh, client) in meshes.items():
                async with steady(client, cases, RUNNING, oracle=name == "oracle"):
                    await asyncio.sleep(SETTLE_S)
                    async with watched(mesh, results[name]):
                        await asyncio.sleep(MEASURED_S)
                await mesh.check_idle()
    for name, wanted in zip(variants, ("", "(wanted: 0.90)", "(wanted: 0.75)"), strict=True):
        print(results[name].row(name, results["oracle"]), wanted)


async def storm(model: Path, cases: Sequence[Case]) -> None:
    """A steady load on a pool that it fits in, with a storm in between."""
    before, during, after = Windows(), Windows(), Windows()
    async with (
        mesh_of(model, num_pages=half_of_wanted(cases), max_running=RUNNING, conservativeness=0.1) as (mesh, client),
        steady(client, cases, STEADY),
    ):
        await asyncio.sleep(SETTLE_S)
        async with watched(mesh, before):
            await asyncio.sleep(2 * MEASURED_S)
        async with watched(mesh, during), asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(ask(client, case, MAX_NEW))
        await asyncio.sleep(RECOVERY_S)
        async with watched(mesh, after):
            await asyncio.sleep(2 * MEASURED_S)
    print(f"a storm of {len(cases)} requests over {STEADY} steady ones")
    print(HEADER)
    for name, windows in (("before", before), ("storm", during), (f"from {RECOVERY_S:.0f} s after", after)):
        print(windows.row(name, before))
    print(f"sequences a step: {after.rows / before.rows:.2f} of what it was before")


async def stress(model: Path, count: int) -> bool:
    """True if every request brought its tokens."""
    workload = Workload(count, 400, 800, VOCAB, range_ratio=0.9)
    planned = plan(workload)
    num_pages = sum(-(-(len(each.token_ids) + each.output_tokens) // PAGE) for each in planned) // 4
    async with mesh_of(model, num_pages=num_pages, max_running=count, conservativeness=0.1) as (mesh, _):
        windows = Windows()
        async with watched(mesh, windows):
            measured = await measure(Load(mesh.router, workload, timeout_s=LIMIT_S))
    good = [record for record in measured.records if not record.failure]
    print(f"{count} prompts, 400 in, 800 out, range ratio 0.9, conservativeness 0.1, {num_pages} pages for a quarter:")
    print(f"{len(good)} of {count} finished in {windows.seconds:.1f} s")
    print(HEADER)
    print(windows.row("stress", windows))
    for failure in {record.failure for record in measured.records if record.failure}:
        print(f"  {failure}")
    return len(good) == count


async def bench(parts: Sequence[str], count: int, num_prompts: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "model", num_layers=4, max_context=1536)
        cases = await make_cases(model, count) if {"lengths", "storm"} & set(parts) else []
        if "lengths" in parts:
            await lengths(model, cases)
        if "storm" in parts:
            await storm(model, cases)
        return await stress(model, num_prompts) if "stress" in parts else True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="lengths,storm,stress")
    parser.add_argument("--requests", type=int, default=192, help="different ones, of lengths and storm")
    parser.add_argument("--prompts", type=int, default=256, help="of stress")
    options = parser.parse_args()
    if not asyncio.run(bench(options.parts.split(","), options.requests, options.prompts)):
        sys.exit(1)


if __name__ == "__main__":
    main()
