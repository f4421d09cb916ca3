"""A stage on a GPU is killed while its peers live: it comes back, the service goes on, no memory of the GPU stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.rpc.client import Client
from tests.gpu.models import random_mistral
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh, running_mesh

COUNT, NEW_TOKENS = 16, 200
NUM_PAGES = 1 << 16  # a pool of a gigabyte a stage: one that stayed would be seen
SLACK_MIB = 512  # what contexts and caches of the same processes differ by from start to start


def used_mib() -> list[int]:
    """Of every GPU, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


async def ask(client: Client, number: int) -> Answer:
    return await generate(
        client, token_request([3 + number] * (40 + number), NEW_TOKENS, ignore_eos=True), timeout_s=60
    )


async def ask_and_kill(mesh: RunningMesh, victim: str) -> list[Answer | StagemeshError]:
    """The stage dies when every request has had a token."""
    waiting, begun = set(range(COUNT)), asyncio.Event()

    async def one(client: Client, number: int) -> Answer | StagemeshError:
        def seen(answer: Answer) -> bool:
            waiting.discard(number)
            if not waiting:
                begun.set()
            return True

        request = token_request([3 + number] * (40 + number), NEW_TOKENS, ignore_eos=True)
        try:
            return await generate(client, request, on_response=seen, timeout_s=60)
        except StagemeshError as error:
            return error

    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(client, number)) for number in range(COUNT)]
        await begun.wait()
        os.kill(mesh.pids[victim], signal.SIGKILL)
    return [task.result() for task in tasks]


@pytest.mark.parametrize("victim", ["decode-0/1", "prefill-0/0"])
def test_a_killed_stage_comes_back(tmp_path: Path, victim: str) -> None:
    path = random_mistral(tmp_path / "model")
    last = torch.cuda.device_count() - 1
    gpus = [f"--prefill-gpus=0,{last}", f"--decode-gpus=0,{last}", "--prefill-pp=2", "--decode-pp=2"]
    sizes = ["--max-running=64", "--chunk-size=2048", f"--num-pages={NUM_PAGES}"]

    async def scenario(mesh: RunningMesh) -> None:
        async with Client(mesh.router, GENERATOR) as client:
            expected = [await ask(client, number) for number in range(COUNT)]
        before = used_mib()
        ends = await ask_and_kill(mesh, victim)
        assert all(isinstance(end, StagemeshError) or len(end.token_ids) == NEW_TOKENS for end in ends)
        await mesh.until_back(victim.partition("/")[0])
        await mesh.until_instances(2)
        async with Client(mesh.router, GENERATOR) as client:
            again = [await ask(client, number) for number in range(COUNT)]
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
        await mesh.check_idle()
        after = used_mib()
        failed = sum(isinstance(end, StagemeshError) for end in ends)
        print(
            f"{victim} killed: {failed} of {COUNT} ended with an error, memory before {before} MiB, after {after} MiB"
        )
        assert all(now - then < SLACK_MIB for now, then in zip(after, before, strict=True))

    with running_mesh(tmp_path, "--device=cuda", f"--model={path}", *gpus, *sizes) as mesh:
        asyncio.run(scenario(mesh))
