"""Instances change their roles while requests come: none is lost, and the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import NEW_TOKENS, check_answers, mesh_of
from tests.support.admin import CommandError, operator
from tests.support.client import GENERATOR
from tests.support.role_switch import Load, switched
from tests.support.running import RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
SWITCHES = (("prefill-1", "decode"), ("prefill-1", "prefill"), ("decode-0", "prefill"), ("decode-0", "decode"))


async def run(mesh: RunningMesh, wanted: list[list[int]]) -> Load:
    pids = mesh.pids
    async with Client(mesh.router, GENERATOR) as client, operator(str(mesh.record["nats"])) as by:
        load = Load(client, wanted, NEW_TOKENS)
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(load.run())
            await load.more(4)
            for instance, role in SWITCHES:
                await switched(by, instance, role, load)
            load.stopped = True
        mesh.read_record()
        assert mesh.pids == pids, "no process was started again"
        kinds = [e["event"] for e in (await by.call("events", limit=1000))["events"]]
        assert kinds.count("role_switched") == len(SWITCHES)
        assert "lost" not in kinds
        await by.call("instance.drain", instance="decode-1")
        for fields, text in (
            ({"instance": "prefill-0", "role": "prefill"}, "role: prefill-0 is a prefill instance already"),
            ({"instance": "decode-0", "role": "prefill"}, "instance: decode-0 is the only decode instance that serves"),
        ):
            with pytest.raises(CommandError) as caught:
                await by.call("role.switch", **fields)
            assert caught.value.text == text
    return load


def test_a_mesh_of_two_and_two_becomes_one_and_three_and_back_and_no_request_is_lost(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    reference = load_reference(model)
    wanted = prompts(12, reference.config.vocab_size)
    with mesh_of(tmp_path, model, 2) as mesh:
        load = asyncio.run(run(mesh, wanted))
        check_answers(reference, load.asked, load.answers)
        asyncio.run(mesh.check_idle())
