"""Blows at the processes of a mesh, each while a request is in a phase that is known, and what came of every request.

Something is stopped for a moment, so that what is looked at stands still: mostly the victim, after whose last word the
broker's tickets and the clients' streams tell in which phase the requests are that it works on; the heads, where the
broker is the victim; the ring of the decode instances, where sequences are to be retracted. If no request is in the
phase that is wanted, all goes on, and the next moment is tried; else the blow falls where it stands.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import cached_property
from typing import Any

from stagemesh.shared.errors import Bug, ProtocolViolation, StagemeshError
from stagemesh.shared.obs.entry import Entry, decode_entries
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.cut import Peer, cut, tcp_ports
from tests.support.fault_cases import ACTIVATIONS, KV, Blow, Case, Outcome, Phase, Result
from tests.support.reference import check_greedy_once
from tests.support.running import RunningMesh

HANG_LIMIT_S = 120.0
AIM_LIMIT_S = 60.0
CALL_LIMIT_S = 10.0
PROVEN_LIMIT_S = 60.0
LOADS = 12  # until a phase is seen: some last for a moment
LOOKS = 5  # at what comes to stand


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

    def again(self) -> Streams:
        """The same requests."""
        return Streams(self._mesh, self._prompts, self._new_tokens)

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

    def hits(self, entries: Iterable[Entry], case: Case) -> int:
        """How many of the requests that the victim works on are in the phase: by what the broker holds, or, for
        retracted ones, the decode heads."""
        if case.phase is Phase.RETRACTED:
            return sum(entry.kind == "sequence" and entry.state == "retracted" for entry in entries)
        tickets, found = [entry for entry in entries if entry.kind == "ticket"], 0
        for ticket in tickets:
            pair = (str(ticket.details["prefill"]), str(ticket.details["decode"]))
            at = int(str(ticket.details["request"]).rpartition("-")[2].partition("/")[0])  # NAME-NUMBER/ATTEMPT
            self._decode[at] = pair[1]
            is_meant = not case.concerned or any(name.startswith(f"{case.concerned}@") for name in pair)
            found += is_meant and self._phase(at, ticket, case) is case.phase
        if case.phase is Phase.DECODING:
            meant = [at for at, name in self._decode.items() if name.startswith(case.concerned)]
            return sum(1 < len(self.answers[at].token_ids) < self._new_tokens for at in meant)
        return found

    def _phase(self, at: int, ticket: Entry, case: Case) -> Phase | None:
        """None if the very stage is through with it. The first one mostly is when the first token comes from the last:
        then it is enough that one of them is not."""
        if ticket.state in ("opened", "reserved"):
            return Phase.QUEUED
        if ticket.state == "filling" and self.answers[at].token_ids:
            return Phase.TRANSFER
        if ticket.state == "filling":
            is_through = case.group.startswith("prefill") and case.process not in ticket.on
            return None if is_through else Phase.PREFILL
        return Phase.COMMITTED if ticket.state == "committed" else None

    def outcome(self, at: int, reference: Any) -> Outcome:
        outcome = judge(reference, self._prompts[at], self.answers[at], self.errors.get(at), self._new_tokens)
        if outcome is Outcome.WRONG:
            self.wrong.append(f"request {at}: {self.answers[at]}"[:200])
        return outcome


def judge(reference: Any, prompt: Sequence[int], answer: Answer, error: Exception | None, new_tokens: int) -> Outcome:
    """`error` is what the request ended with, if it had no ending of its own."""
    try:
        check_greedy_once(reference, tuple(prompt), tuple(answer.token_ids))
    except AssertionError:
        return Outcome.WRONG
    if isinstance(error, TimeoutError):
        return Outcome.HANG
    if error is not None:
        return Outcome.WRONG if isinstance(error, Bug | ProtocolViolation) else Outcome.ERROR
    whole = answer.reason == "length" and len(answer.token_ids) == new_tokens
    return Outcome.EXACT if whole else Outcome.WRONG


class Aim:
    """Who is stopped while one looks, and where one looks."""

    def __init__(self, mesh: RunningMesh, case: Case, peers: Mapping[str, str]) -> None:
        self.case, self._peers, self._pids = case, peers, mesh.pids
        heads = sorted(name for name in peers if name.endswith("/0"))
        decodes = [name for name in heads if name.startswith(case.concerned or "decode")]
        self.witnesses, self.still = ["broker"], [case.process]
        if case.phase is Phase.RETRACTED:
            self.witnesses, self.still = decodes, [f"{name.partition('/')[0]}/1" for name in decodes]
        elif case.process == "broker":
            self.still = heads
        self.pids, self._victim = [mesh.pids[name] for name in self.still], mesh.pids[case.process]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is looked at stands still meanwhile; the victim may stay as it is at the end."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in self.pids:
                if pid != self._victim:
                    os.kill(pid, signal.SIGCONT)

    def spare(self) -> None:
        """The victim goes on."""
        os.kill(self._victim, signal.SIGCONT)

    def deal(self) -> bool:
        """False if there is no such connection to be cut at the moment."""
        match self.case.blow:
            case Blow.KILL:
                os.kill(self._victim, signal.SIGKILL)
            case Blow.STOP:
                os.kill(self._victim, signal.SIGSTOP)
            case Blow.CUT:
                num_cut = cut(self._victim, self._is_meant)
                self.spare()
                return num_cut > 0
        return True

    def _is_meant(self, peer: Peer) -> bool:
        if isinstance(peer, tuple):
            return peer[1] in self._ports
        return f"unix:{peer}" == self._peers.get(self.case.target)

    @cached_property
    def _ports(self) -> frozenset[int]:
        """Of the processes at the other end."""
        ends = {KV: "decode-", ACTIVATIONS: f"{self.case.group}/"}.get(self.case.target, "none")
        others = (pid for name, pid in self._pids.items() if name.startswith(ends) and pid != self._victim)
        return frozenset[int]().union(*map(tcp_ports, others))


async def strike(mesh: RunningMesh, case: Case, streams: Streams, peers: Mapping[str, str]) -> int:
    """Deals the blow; returns how many requests it has hit in their phase: 0, and no blow, if there never was one."""
    aim = Aim(mesh, case, peers)
    async with asyncio.timeout(AIM_LIMIT_S), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(peers[name], INSPECT)) for name in aim.witnesses]
        while streams.over < len(streams.answers):
            await streams.moved.wait()
            streams.moved.clear()
            with aim.stopped():
                for _ in range(LOOKS):
                    entries = [entry for client in clients for entry in await _dump(client)]
                    if (hit := streams.hits(entries, case)) and aim.deal():
                        return hit
                aim.spare()
        return 0


async def _dump(client: Client) -> list[Entry]:
    reply = await client.call("Dump", inspect_pb2.DumpRequest(), timeout_s=CALL_LIMIT_S)
    return decode_entries(reply.entries)


async def until_acted(mesh: RunningMesh, case: Case, peers: Mapping[str, str], deaths: int) -> None:
    """The router knows that an instance is lost, or the heads that a router is: whatever it had there is given up.
    Broker and bus have been killed where they do not end by themselves, and reaped: for the `deaths`th time."""
    if case.is_stage:
        await mesh.until_instances(3)
        return
    if case.process != "router":
        await asyncio.to_thread(mesh.until_said, died(case), deaths)
        return
    async with AsyncExitStack() as stack:
        heads = [name for name in peers if name.endswith("/0")]
        clients = [await stack.enter_async_context(Client(peers[name], INSPECT)) for name in heads]
        for client in clients:
            while await _requests(client):
                pass


def died(case: Case) -> str:
    """What `up` says of a victim that it has reaped."""
    return f"stagemesh: error: {case.process} was killed by SIGKILL\n"


async def _requests(client: Client) -> int:
    reply = await client.call("Check", inspect_pb2.CheckRequest(), timeout_s=CALL_LIMIT_S)
    return int(reply.held["requests"])


async def epoch_of(instance: str, broker: str) -> int | None:
    """None while it is not in the directory."""
    async with Client(broker, INSPECT) as client:
        entries = await _dump(client)
    known = {entry.name: int(str(entry.details["epoch"])) for entry in entries if entry.kind == "instance"}
    return known.get(instance)


async def until_proven(mesh: RunningMesh, group: str, epoch: int | None, broker: str, *, instances: int = 4) -> bool:
    """Returns once every ticket is closed and the router sees all instances: whether that took a restart of `group`,
    which the mesh brings about by itself where a write of it is in doubt."""
    async with asyncio.timeout(PROVEN_LIMIT_S), Client(broker, INSPECT) as client:
        while any(entry.kind == "ticket" for entry in await _dump(client)):
            pass
    await mesh.until_instances(instances)
    renewed = await epoch_of(group, broker) != epoch
    if renewed:
        await asyncio.to_thread(mesh.until_said, f"{group} ends to be started again")
    return renewed


async def _strike_under_load(mesh: RunningMesh, result: Result, streams: Streams, peers: Mapping[str, str]) -> None:
    case, deaths = result.case, mesh.num_said(died(result.case))
    async with asyncio.TaskGroup() as group:
        load = group.create_task(streams.run(f"{case.group}.{time.monotonic_ns()}"))
        streams.moved.set()
        result.hit = await strike(mesh, case, streams, peers)
        struck_s = time.monotonic()
        if not (result.hit and case.is_loss):
            return
        acted = group.create_task(until_acted(mesh, case, peers, deaths + 1))
        if case.target == ACTIVATIONS:  # nobody misses a connection that is not used any more, or is made anew
            await asyncio.wait({load, acted}, return_when=asyncio.FIRST_COMPLETED)
            if not acted.done():
                acted.cancel()
                return
        await acted
        result.acted_s = time.monotonic() - struck_s


async def _use(streams: Streams, result: Result, reference: Any) -> None:
    """The same requests once more, so that a connection is missed that was cut when it was not used."""
    again = streams.again()
    await again.run(f"again.{time.monotonic_ns()}")
    for at in range(len(again.answers)):
        if (outcome := again.outcome(at, reference)) is not Outcome.EXACT:
            result.outcomes[outcome] += 1


async def run_case(
    mesh: RunningMesh, case: Case, reference: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Result:
    """Deals one blow under load and waits until the mesh is whole again. Nobody else is started again, and who has a
    write in doubt is by itself. Without a hit where no request was ever in that phase."""
    result, began_s = Result(case), time.monotonic()
    start, before, peers = mesh.num_starts(case.group) + 1, mesh.pids, await mesh.peers()
    epoch = await epoch_of(case.group, peers["broker"]) if case.target in (KV, ACTIVATIONS) else None
    for _ in range(LOADS):
        streams = Streams(mesh, prompts, new_tokens)
        await _strike_under_load(mesh, result, streams, peers)
        if result.hit:
            break
    if not result.hit:
        return result
    for at in range(len(prompts)):
        result.outcomes[streams.outcome(at, reference)] += 1
    result.errors.update(f"{type(error).__name__}: {error}" for error in streams.errors.values())
    result.errors.update(streams.wrong)
    if case.target in (KV, ACTIVATIONS):
        await _use(streams, result, reference)
    if case.target == KV:
        result.renewed = await until_proven(mesh, case.group, epoch, peers["broker"])
    is_lost = case.is_loss
    if case.target == ACTIVATIONS:
        is_lost = await epoch_of(case.group, peers["broker"]) != epoch
    restarted = {case.group} if is_lost or result.renewed else set[str]()
    for group in restarted:
        await mesh.until_back(group, start)
    await mesh.until_instances(4)
    await mesh.check_idle()
    mesh.read_record()
    changed = {name.partition("/")[0] for name, pid in mesh.pids.items() if pid != before[name]}
    assert changed == restarted, f"{case}: {changed} were started again\n{mesh.said}"
    result.took_s = time.monotonic() - began_s
    return result
