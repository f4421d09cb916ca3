"""Blows at the processes of a mesh, each while a request is in a phase that is known, and what came of every request.

The victim is stopped for a moment. It says nothing more then, so what its peers show stands still: the broker's tickets
and the clients' streams tell in which phase the requests are that it works on. If none is in the phase that is wanted,
the victim goes on, and the next moment is tried; else the blow falls where it stands.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stagemesh.shared.errors import Bug, ProtocolViolation, StagemeshError
from stagemesh.shared.obs.entry import Entry, decode_entries
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.cut import cut
from tests.support.reference import check_greedy
from tests.support.running import RunningMesh

HANG_LIMIT_S = 120.0
AIM_LIMIT_S = 60.0
CALL_LIMIT_S = 10.0
LOOKS = 5  # at what comes to stand before a victim that is stopped


class Blow(Enum):
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"


class Phase(Enum):
    """Of a request, as its ticket and its stream show it."""

    QUEUED = "queued"  # no page is its own yet, or nothing has been begun
    PREFILL = "prefill chunk"  # writes have been announced; its first token has not come
    TRANSFER = "mid-transfer"  # its first token has come; not all of its KV has been reported
    COMMITTED = "committed"  # all KV is there; the decode side has not said so, or has made no token
    DECODING = "decoding"


class Outcome(Enum):
    EXACT = "exact"
    ERROR = "true error"  # after nothing but right tokens
    WRONG = "wrong"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Case:
    """`victim` is `router` or a stage such as `prefill-0/1`; for CUT a link, from one that has connected to another:
    `router>decode-0/0`, `decode-0/0>decode-0/1`, or to where KV goes, `prefill-0/1>kv`."""

    victim: str
    blow: Blow
    phase: Phase

    @property
    def process(self) -> str:
        return self.victim.partition(">")[0]

    @property
    def target(self) -> str:
        """The other end of a link."""
        return self.victim.partition(">")[2]

    @property
    def group(self) -> str:
        """What is started again with it."""
        return self.process.partition("/")[0]

    @property
    def is_stage(self) -> bool:
        return "/" in self.process

    @property
    def is_loss(self) -> bool:
        """Something must be started again: a process is gone, or an instance is not one any more."""
        return self.blow is not Blow.CUT or self.target.startswith(f"{self.group}/")

    def __str__(self) -> str:
        return f"{self.victim} {self.blow.name} {self.phase.value}"


@dataclass(slots=True)
class Result:
    """`acted_s` is from the blow until the router knows, for a stage. `hit` counts the requests in the phase."""

    case: Case
    hit: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    acted_s: float | None = None
    took_s: float = 0.0
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def row(self) -> str:
        counts = "".join(f"{self.outcomes[outcome]:>11}" for outcome in Outcome)
        acted = "-" if self.acted_s is None else f"{self.acted_s:.2f} s"
        return f"{self.case!s:<40}{self.hit:>5}{counts}{acted:>9}{self.took_s:>8.1f} s"


def table(results: Iterable[Result]) -> str:
    head = "".join(f"{outcome.value:>11}" for outcome in Outcome)
    lines = [f"{'case':<40}{'hit':>5}{head}{'acted':>9}{'took':>10}"]
    for result in results:
        lines.append(result.row())
        lines += [f"    {count} x {error}" for error, count in result.errors.most_common(3)]
    return "\n".join(lines)


class Streams:
    """Requests that all arrive at once, and what each has brought."""

    def __init__(self, mesh: RunningMesh, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._mesh, self._prompts, self._new_tokens = mesh, prompts, new_tokens
        self.answers = [Answer() for _ in prompts]
        self.errors: dict[int, StagemeshError | TimeoutError] = {}
        self.wrong: list[str] = []
        self._decode: dict[int, str] = {}  # request -> the decode instance that its last ticket is for
        self.over = 0
        self.moved = asyncio.Event()  # something has come

    async def run(self, name: str) -> None:
        async with Client(self._mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            for at in range(len(self._prompts)):
                group.create_task(self._ask(client, at, f"{name}-{at}"))

    async def _ask(self, client: Client, at: int, request_id: str) -> None:
        request = token_request(self._prompts[at], self._new_tokens, ignore_eos=True, request_id=request_id)

        def took(so_far: Answer) -> bool:
            self.answers[at] = so_far
            self.moved.set()
            return True

        try:
            async with asyncio.timeout(HANG_LIMIT_S):
                self.answers[at] = await generate(client, request, on_response=took, timeout_s=2 * HANG_LIMIT_S)
        except (StagemeshError, TimeoutError) as error:
            self.errors[at] = error
        finally:
            self.over += 1
            self.moved.set()

    def phases(self, tickets: Iterable[Entry], case: Case) -> Counter[Phase]:
        """Of the requests that the victim's instance works on; for a router, of all."""
        found = Counter[Phase]()
        for ticket in tickets:
            pair = (str(ticket.details["prefill"]), str(ticket.details["decode"]))
            at = int(str(ticket.details["request"]).rpartition("-")[2].partition("/")[0])  # NAME-NUMBER/ATTEMPT
            self._decode[at] = pair[1]
            if not case.is_stage or any(name.startswith(f"{case.group}@") for name in pair):
                found[self._phase(at, ticket.state)] += 1
        if not case.group.startswith("prefill"):
            mine = [at for at, name in self._decode.items() if not case.is_stage or name.startswith(f"{case.group}@")]
            found[Phase.DECODING] = sum(1 < len(self.answers[at].token_ids) < self._new_tokens for at in mine)
        return found

    def _phase(self, at: int, ticket_state: str) -> Phase:
        if ticket_state in ("opened", "reserved"):
            return Phase.QUEUED
        if ticket_state == "filling":
            return Phase.TRANSFER if self.answers[at].token_ids else Phase.PREFILL
        return Phase.COMMITTED

    def outcome(self, at: int, reference: Any) -> Outcome:
        answer, error = self.answers[at], self.errors.get(at)
        try:
            check_greedy(reference, self._prompts[at], answer.token_ids)
        except AssertionError as wrong:
            self.wrong.append(str(wrong))
            return Outcome.WRONG
        if isinstance(error, TimeoutError):
            return Outcome.HANG
        if error is not None:
            return Outcome.WRONG if isinstance(error, Bug | ProtocolViolation) else Outcome.ERROR
        whole = answer.reason == "length" and len(answer.token_ids) == self._new_tokens
        return Outcome.EXACT if whole else Outcome.WRONG


async def strike(mesh: RunningMesh, case: Case, streams: Streams) -> int:
    """Deals the blow; returns how many requests it has hit in their phase. Fails if there never was one."""
    pid, peers = mesh.pids[case.process], await mesh.peers()
    async with asyncio.timeout(AIM_LIMIT_S), Client(peers["broker"], INSPECT) as client:
        while True:
            await streams.moved.wait()
            streams.moved.clear()
            os.kill(pid, signal.SIGSTOP)
            for _ in range(LOOKS):
                reply = await client.call("Dump", inspect_pb2.DumpRequest(), timeout_s=CALL_LIMIT_S)
                tickets = [entry for entry in decode_entries(reply.entries) if entry.kind == "ticket"]
                if hit := streams.phases(tickets, case)[case.phase]:
                    deal(case, pid, peers)
                    return hit
            os.kill(pid, signal.SIGCONT)
            assert streams.over < len(streams.answers), f"{case}: no request was ever in that phase"


def deal(case: Case, pid: int, peers: Mapping[str, str]) -> None:
    """To a process that is stopped."""
    match case.blow:
        case Blow.KILL:
            os.kill(pid, signal.SIGKILL)
        case Blow.CUT:
            path = peers.get(case.target, "").removeprefix("unix:")
            num_cut = cut(pid, lambda peer: isinstance(peer, tuple) if case.target == "kv" else peer == path)
            os.kill(pid, signal.SIGCONT)
            assert num_cut, f"{case}: there is no such connection"
        case Blow.STOP:
            pass


async def run_case(
    mesh: RunningMesh, case: Case, reference: Any, prompts: Sequence[Sequence[int]], new_tokens: int, *, start: int
) -> Result:
    """Deals one blow under load and waits until the mesh is whole again. `start` is how often the victim's group will
    have been started then."""
    result, streams, began_s = Result(case), Streams(mesh, prompts, new_tokens), time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(streams.run(f"{case.group.replace('/', '.')}-{start}"))
        streams.moved.set()
        result.hit = await strike(mesh, case, streams)
        struck_s = time.monotonic()
        if case.is_stage and case.is_loss:
            await mesh.until_instances(3)
            result.acted_s = time.monotonic() - struck_s
    for at in range(len(prompts)):
        result.outcomes[streams.outcome(at, reference)] += 1
    result.errors.update(f"{type(error).__name__}: {error}" for error in streams.errors.values())
    result.errors.update(streams.wrong)
    if case.is_loss:
        await mesh.until_back(case.group, start)
    await mesh.until_instances(4)
    result.took_s = time.monotonic() - began_s
    return result
