"""A mesh for a long time: what memory each of its processes has, request after request; and whether it is awake after
having been left alone.

    PYTHONPATH=.ns:. python tests/bench/soak.py [--requests 20000] [--at-once 48] [--idle-minutes 0]

A tiny model, two prefill and two decode stages. Prompts of 2 to 60 tokens, 2 to 12 new ones; of 32 requests one goes
away after its first token and one asks for what can never be. With --idle-minutes the mesh is left alone for so long
after the first tenth, and what the next request takes is printed.

Exits with 1 if a request does not end as it must, something is still held at the end, or a process has more memory then
than at half time, by more than LEEWAY.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.resident import rss_mib
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

VOCAB: Final = 320
CONTEXT: Final = 128
LOOKS: Final = 10  # at memory, at even distances
LEEWAY: Final = (1.05, 4.0)  # times, and MiB more
OPTIONS: Final = (
    *("--page-size", "8", "--chunk-size", "64", "--num-pages", "1024", "--max-running", "48"),
    *("--prefill-pp", "2", "--decode-pp", "2"),
)


@dataclass(frozen=True, slots=True)
class Look:
    """At all processes, after so many requests."""

    requests: int
    elapsed_s: float
    rss_mib: dict[str, float]


class Soak:
    """Requests of all kinds, so many at once, and what came of them."""

    def __init__(self, mesh: RunningMesh, total: int, at_once: int) -> None:
        self._mesh, self._at_once = mesh, at_once
        self._every = max(1, total // LOOKS)
        self._began_s = time.monotonic()
        self.looks: list[Look] = []
        self.ends = Counter[str]()

    async def run(self, share: Iterator[int]) -> None:
        async with Client(self._mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(self._ask_on(client, share))

    async def _ask_on(self, client: Client, share: Iterator[int]) -> None:
        for number in share:
            self.ends[await ask(client, number)] += 1
            if (done := self.ends.total()) % self._every == 0:
                self.look(done)

    def look(self, done: int) -> None:
        rss = {name: rss_mib(pid) for name, pid in self._mesh.pids.items()}
        rss["up"] = rss_mib(self._mesh.process.pid)
        self.looks.append(Look(done, time.monotonic() - self._began_s, rss))
        print(f"{done} requests, {self.looks[-1].elapsed_s:.0f} s, {sum(rss.values()):.1f} MiB", flush=True)


async def ask(client: Client, number: int) -> str:
    """How it has ended, in a word."""
    rng = random.Random(number)
    prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 60))]
    count = rng.randint(2, 12)
    match number % 32:
        case 7:
            answer = await generate(client, token_request(prompt, 60, ignore_eos=True), on_response=gone_at_once)
            return "gone" if not answer.reason else "wrong"
        case 19:
            try:
                await generate(client, token_request(prompt, 2 * CONTEXT))
            except Rejected:
                return "refused"
            return "wrong"
    answer = await generate(client, token_request(prompt, count, ignore_eos=True))
    return "whole" if answer.reason == "length" and len(answer.token_ids) == count else "wrong"


def gone_at_once(so_far: Answer) -> bool:
    """Whether to stay."""
    return not so_far.token_ids


def table(looks: list[Look]) -> str:
    lines = [f"{'MiB after requests':<20}" + "".join(f"{look.requests:>9}" for look in looks)]
    for name in looks[-1].rss_mib:
        lines.append(f"{name:<20}" + "".join(f"{look.rss_mib[name]:>9.1f}" for look in looks))
    return "\n".join(lines)


def grown(looks: list[Look]) -> dict[str, str]:
    """Processes that have more memory at the end than at half time."""
    half, end = looks[len(looks) // 2], looks[-1]
    factor, more = LEEWAY
    return {
        name: f"{half.rss_mib[name]:.1f} -> {mib:.1f} MiB"
        for name, mib in end.rss_mib.items()
        if mib > factor * half.rss_mib[name] + more
    }


async def leave_alone(minutes: float) -> None:
    try:
        async with asyncio.timeout(60 * minutes):
            await asyncio.Event().wait()
    except TimeoutError:
        pass


async def first_after(mesh: RunningMesh) -> float:
    """Seconds of one request."""
    async with Client(mesh.router, GENERATOR) as client:
        began_s = time.monotonic()
        assert await ask(client, 0) == "whole"
        return time.monotonic() - began_s


async def soak(mesh: RunningMesh, total: int, at_once: int, idle_minutes: float) -> int:
    work = Soak(mesh, total, at_once)
    await work.run(iter(range(total // 10)))
    if idle_minutes:
        before_s = await first_after(mesh)
        print(f"left alone for {idle_minutes:g} minutes", flush=True)
        await leave_alone(idle_minutes)
        print(f"one request: {before_s:.3f} s before, {await first_after(mesh):.3f} s after", flush=True)
    await work.run(iter(range(total // 10, total)))
    await mesh.check_idle()
    more = grown(work.looks)
    print(f"\n{table(work.looks)}\n{dict(work.ends)}, {total / work.looks[-1].elapsed_s:.1f} a second")
    for name, said in more.items():
        print(f"{name} grows: {said}")
    return 1 if more or work.ends["wrong"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--idle-minutes", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "model", max_context=CONTEXT, num_layers=2)
        with running_mesh(Path(folder), "--model", str(model), *OPTIONS) as mesh:
            return asyncio.run(soak(mesh, options.requests, options.at_once, options.idle_minutes))


if __name__ == "__main__":
    sys.exit(main())
