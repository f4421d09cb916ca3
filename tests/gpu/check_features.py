"""What a mesh can do, done on a GPU: an instance changes its role under load; KV that arrives wrong is found by its
sums."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stagemesh.shared.rpc.client import Client
from tests.gpu.answers import ask_all, check_likeliest, gpus
from tests.gpu.models import random_mistral
from tests.support.admin import CommandError, operator
from tests.support.client import GENERATOR
from tests.support.corrupting_mesh import CORRUPT
from tests.support.role_switch import Load, switched
from tests.support.running import RunningMesh, running_mesh

COUNT, NEW_TOKENS, WRONG_WRITES = 12, 40, 2
PROMPTS = [[3 + number] * (40 + 16 * number) for number in range(COUNT)]
LAYOUT = ("--prefill-pp=2", "--decode-pp=2", f"--prefill-gpus={gpus(2, 0)}", f"--decode-gpus={gpus(2, 0)}")
SIZES = ("--max-running=64", "--chunk-size=512", "--num-pages=2048")


def test_an_instance_becomes_one_of_decode_and_one_of_prefill_again(tmp_path: Path) -> None:
    async def scenario(mesh: RunningMesh) -> Load:
        await mesh.until_instances(3)
        async with Client(mesh.router, GENERATOR) as client, operator(str(mesh.record["nats"])) as by:
            load = Load(client, PROMPTS, NEW_TOKENS)
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(load.run())
                await load.more(4)
                await switched(by, "prefill-1", "decode", load)
                with pytest.raises(CommandError, match="packed its matrices"):
                    await by.call("role.switch", instance="decode-0", role="prefill")
                await by.call("instance.drain", instance="decode-0")
                await load.more(8)  # by the one that was prefill's
                await by.call("instance.resume", instance="decode-0")
                await switched(by, "prefill-1", "prefill", load)
                load.stopped = True
        await mesh.check_idle()
        return load

    path = random_mistral(tmp_path / "model")
    options = ["--device=cuda", f"--model={path}", "--prefill-instances=2", *LAYOUT, *SIZES]
    with running_mesh(tmp_path, *options) as mesh:
        load = asyncio.run(scenario(mesh))
    answers = [answer.token_ids for answer in load.answers]
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    check_likeliest(path, load.asked, answers, f"{len(answers)} answers while roles changed")


def test_kv_that_arrives_wrong_is_found_and_computed_again(tmp_path: Path) -> None:
    async def scenario(mesh: RunningMesh) -> list[list[int]]:
        answers = await ask_all(mesh.router, PROMPTS, NEW_TOKENS)
        await mesh.check_idle()
        return [answer.token_ids for answer in answers]

    path = random_mistral(tmp_path / "model")
    environ = {"STAGEMESH_TRANSFER__KV_CHECKSUM": "true", CORRUPT: str(WRONG_WRITES)}
    options = ["--device=cuda", f"--model={path}", *LAYOUT, *SIZES]
    with running_mesh(tmp_path, *options, environ=environ, module="tests.support.corrupting_mesh") as mesh:
        answers = asyncio.run(scenario(mesh))
        found = mesh.num_said("KV is corrupt")
    assert found
    check_likeliest(path, PROMPTS, answers, f"corrupt KV was found {found} times, {COUNT} answers")
