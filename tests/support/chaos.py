"""Steady load on a mesh whose processes die at random: what every request came to, tokens over time, and memory."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.fault_cases import Outcome
from tests.support.faults import HANG_LIMIT_S, judge
from tests.support.resident import rss_mib
from tests.support.running import RunningMesh

BEFORE_S = 6.0  # of the rate before a kill
WINDOW_S = 2.0  # of the rate after it
RECOVERED = 0.7  # of the rate before it: rates of a window vary


@dataclass(frozen=True, slots=True)
class Done:
    """A request that has ended; times are CLOCK_MONOTONIC in seconds."""

    prompt: int
    began_s: float
    ended_s: float
    answer: Answer
    error: StagemeshError | TimeoutError | None


@dataclass(frozen=True, slots=True)
class Kill:
    """`back_s` is when the mesh was whole again."""

    victim: str
    at_s: float
    back_s: float


@dataclass(slots=True)
class Record:
    """`rss_mib` is of all processes together, before each kill and at the end."""

    done: list[Done] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # in order
    kills: list[Kill] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    aside: Counter[Outcome] = field(default_factory=Counter)  # of requests that a router had when it was killed

    def judge(self, reference: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        known: dict[object, Outcome] = {}  # most answers to a prompt are the same
        for done in self.done:
            key = (done.prompt, tuple(done.answer.token_ids), done.answer.reason, type(done.error))
            if key not in known:
                known[key] = judge(reference, prompts[done.prompt], done.answer, done.error, new_tokens)
            outcome = known[key]
            (self.aside if self._on_a_killed_router(done) else self.outcomes)[outcome] += 1

    def _on_a_killed_router(self, done: Done) -> bool:
        return any(k.victim == "router" and done.began_s <= k.back_s and done.ended_s >= k.at_s for k in self.kills)

    @property
    def right_share(self) -> float:
        return self.outcomes[Outcome.EXACT] / max(1, self.outcomes.total())

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens a second."""
        return (bisect_left(self.token_s, end_s) - bisect_left(self.token_s, start_s)) / (end_s - start_s)

    def recovery_s(self, kill: Kill) -> float:
        """From the kill until the rate is RECOVERED; infinity if that has not been seen."""
        wanted = RECOVERED * self.rate(kill.at_s - BEFORE_S, kill.at_s)
        starts = [kill.at_s, *(at for at in self.token_s if at > kill.at_s)]
        last_s = self.token_s[-1] - WINDOW_S
        reached = (at - kill.at_s for at in starts if at <= last_s and self.rate(at, at + WINDOW_S) >= wanted)
        return next(reached, float("inf"))

    def text(self) -> Iterator[str]:
        yield f"{'kill':<12}{'whole after':>12}{'tokens/s before':>17}{'as fast after':>15}{'MiB':>9}"
        for kill, mib in zip(self.kills, self.rss_mib, strict=False):
            rate = self.rate(kill.at_s - BEFORE_S, kill.at_s)
            back, again = kill.back_s - kill.at_s, self.recovery_s(kill)
            yield f"{kill.victim:<12}{back:>10.1f} s{rate:>17.0f}{again:>13.1f} s{mib:>9.0f}"
        yield f"at the end {self.rss_mib[-1]:.0f} MiB"
        for name, outcomes in (("requests", self.outcomes), ("on a killed router", self.aside)):
            yield f"{name}: " + ", ".join(f"{outcomes[outcome]} {outcome.value}" for outcome in Outcome)
        errors = Counter(f"{type(done.error).__name__}: {done.error}" for done in self.done if done.error is not None)
        yield from (f"    {count} x {error}" for error, count in errors.most_common(8))


class Chaos:
    """`num_clients` ask one request after the other; every `period_s`, once the mesh is whole again, a process dies."""

    def __init__(self, mesh: RunningMesh, prompts: Sequence[Sequence[int]], new_tokens: int, num_clients: int) -> None:
        self._mesh, self._prompts, self._new_tokens, self._num_clients = mesh, prompts, new_tokens, num_clients
        self._over = False
        self.record = Record()

    async def run(self, victims: Sequence[str], duration_s: float, period_s: float, seed: int) -> Record:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_clients):
                group.create_task(self._ask_on(random.Random(f"{seed}/{number}")))
            try:
                await self._kill_on(rounds(victims, random.Random(seed)), duration_s, period_s)
            finally:
                self._over = True
        return self.record

    async def _ask_on(self, rng: random.Random) -> None:
        async with Client(self._mesh.router, GENERATOR) as client:
            while not self._over:
                await self._ask(client, rng.randrange(len(self._prompts)))

    async def _ask(self, client: Client, at: int) -> None:
        partial, answer, error, began_s = Answer(), None, None, time.monotonic()

        def took(so_far: Answer) -> bool:
            self.record.token_s += [time.monotonic()] * (len(so_far.token_ids) - len(partial.token_ids))
            partial.token_ids = list(so_far.token_ids)
            return True

        request = token_request(self._prompts[at], self._new_tokens, ignore_eos=True)
        try:
            async with asyncio.timeout(HANG_LIMIT_S):
                answer = await generate(client, request, on_response=took)
        except (StagemeshError, TimeoutError) as failure:
            error = failure
        self.record.done.append(Done(at, began_s, time.monotonic(), answer or partial, error))
        if error is not None:
            await self._router_answers()  # a client that comes back when it makes sense

    async def _router_answers(self) -> None:
        while not self._over:
            try:
                async with Client(self._mesh.router, INSPECT) as client:
                    await client.call("Check", inspect_pb2.CheckRequest(), timeout_s=HANG_LIMIT_S)
                return
            except StagemeshError:
                await pause(0.1)

    async def _kill_on(self, victims: Iterator[str], duration_s: float, period_s: float) -> None:
        began_s = time.monotonic()
        for number in range(1, int(duration_s / period_s)):
            await pause(began_s + number * period_s - time.monotonic())
            victim = next(victims)
            group = victim.partition("/")[0]
            start = self._mesh.num_starts(group) + 1
            self.record.rss_mib.append(self._rss_mib())
            at_s = time.monotonic()
            os.kill(self._mesh.pids[victim], signal.SIGKILL)
            await self._mesh.until_back(group, start)
            await self._mesh.until_instances(4)
            self.record.kills.append(Kill(victim, at_s, time.monotonic()))
        await pause(period_s)
        self.record.rss_mib.append(self._rss_mib())

    def _rss_mib(self) -> float:
        return sum(map(rss_mib, self._mesh.pids.values()))


def rounds(victims: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Each once, in some order, and again."""
    while True:
        yield from rng.sample(victims, len(victims))


async def pause(duration_s: float) -> None:
    """Load runs meanwhile."""
    try:
        async with asyncio.timeout(max(0.0, duration_s)):
            await asyncio.Event().wait()
    except TimeoutError:
        pass
