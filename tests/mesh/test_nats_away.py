"""The NATS server is stopped, or killed: requests go on, and an instance that starts meanwhile waits, then joins."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stagemesh.shared.bus.events import EventKind, MeshEvent, events_subject
from stagemesh.shared.bus.nats import open_nats_bus
from stagemesh.shared.obs.entry import decode_entries
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT
from stagemesh.shared.runtime.control import CONTROL_SOCKET, ControlReply, ControlRequest, ask
from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import COUNT, Load, Strike, check_answers, mesh_of
from tests.support.running import START_LIMIT_S, RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
VICTIM = "decode-0/0"


async def epochs(mesh: RunningMesh) -> dict[str, int]:
    """Of the instances that the router can talk to."""
    async with Client(mesh.router, INSPECT) as client:
        dump = await client.call("Dump", inspect_pb2.DumpRequest(), timeout_s=10)
    sessions = [entry for entry in decode_entries(dump.entries) if entry.kind == "session" and entry.state == "up"]
    return {name: int(epoch) for name, _, epoch in (entry.name.partition("@") for entry in sessions)}


def restart(mesh: RunningMesh, group: str) -> ControlReply:
    return ask(Path(mesh.record["run_dir"]) / CONTROL_SOCKET, ControlRequest("restart", group), START_LIMIT_S)


async def answer(mesh: RunningMesh, reference: Any, strike: Strike) -> None:
    wanted = prompts(COUNT, reference.config.vocab_size)
    load = Load(mesh, wanted, strike)
    check_answers(reference, wanted, await load.run())
    assert load.struck.is_set()


async def go_without(mesh: RunningMesh, reference: Any, number: signal.Signals) -> None:
    before, nats = await epochs(mesh), mesh.pids["nats"]
    os.kill(nats, number)
    await answer(mesh, reference, Strike(VICTIM, 0.3))
    if number is signal.SIGSTOP:
        await asyncio.to_thread(mesh.until_said, "waiting for the NATS server")
        assert set(await epochs(mesh)) == set(before) - {"decode-0"}
        await answer(mesh, reference, Strike("nats", 0.3, signal.SIGCONT))
    await mesh.until_back("decode-0")
    await mesh.until_instances(4)
    assert await epochs(mesh) == {**before, "decode-0": before["decode-0"] + 1}


async def presence_is_told(mesh: RunningMesh) -> None:
    """By the broker, whose connection has lived through it, of an instance that leaves and one that joins."""
    heard: asyncio.Queue[MeshEvent] = asyncio.Queue()
    epoch = (await epochs(mesh))["decode-1"]
    async with open_nats_bus(mesh.record["nats"], name="test", connect_timeout_s=START_LIMIT_S) as bus:
        subject = events_subject("*", "decode-1")
        await bus.subscribe(subject, lambda _, payload: heard.put_nowait(msgspec.json.decode(payload, type=MeshEvent)))
        async with asyncio.timeout(START_LIMIT_S):
            assert (await asyncio.to_thread(restart, mesh, "decode-1")).epoch == epoch + 1
            told: list[tuple[EventKind, object]] = []
            while (EventKind.JOINED, epoch + 1) not in told:
                event = await heard.get()
                told.append((event.event, event.details["epoch"]))
    assert (EventKind.LEFT, epoch) in told


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_requests_do_without_and_who_starts_meanwhile_waits(tmp_path: Path, number: signal.Signals) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    reference = load_reference(model)
    with mesh_of(tmp_path, model, 2, module="tests.support.patient_up") as mesh:

        async def run() -> None:
            await go_without(mesh, reference, number)
            await presence_is_told(mesh)
            await mesh.check_idle()

        asyncio.run(run())
