"""Every process of a mesh is started again, one group after the other, under load: no request fails."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Retryable, Unreachable
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.backoff import delays
from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import NEW_TOKENS, check_answers, mesh_of
from tests.mesh.test_steer import ENVIRON
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.mesh import ROOT
from tests.support.running import RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "stagemesh.shared.cli.main", "rolling-restart"]


class Users:
    """Each asks again and again until told to stop. A router that is being started again refuses, before any token has
    come: then one asks once more."""

    def __init__(self, mesh: RunningMesh, wanted: list[list[int]]) -> None:
        self._mesh, self._wanted = mesh, wanted
        self.enough = asyncio.Event()
        self.all: list[tuple[list[int], Answer]] = []
        self.num_refused = 0

    async def run(self, count: int) -> None:
        async with Client(self._mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            for user in range(count):
                group.create_task(self._use(client, user))

    async def _use(self, client: Client, user: int) -> None:
        at = user
        while not self.enough.is_set():
            prompt = self._wanted[at % len(self._wanted)]
            self.all.append((prompt, await self._ask(client, prompt)))
            at += 7

    async def _ask(self, client: Client, prompt: list[int]) -> Answer:
        has_begun = False

        def took(so_far: Answer) -> bool:
            nonlocal has_begun
            has_begun = True
            return True

        for delay_s in delays():
            try:
                return await generate(client, token_request(prompt, NEW_TOKENS, ignore_eos=True), on_response=took)
            except Retryable as error:
                refused = isinstance(error, Unreachable) or "is being stopped" in str(error)
                if has_begun or not refused:
                    raise
                self.num_refused += 1
                await asyncio.sleep(delay_s)
        raise AssertionError("delays never end")


async def restart_all(mesh: RunningMesh, *options: str) -> tuple[int, str]:
    arguments = ["--run-dir", mesh.record["run_dir"], *options]
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, cwd=ROOT, env=ENVIRON, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def roll(mesh: RunningMesh, reference: Any, num_users: int, rounds: int) -> None:
    before, users = mesh.pids, Users(mesh, prompts(24, reference.config.vocab_size))
    async with asyncio.TaskGroup() as group:
        group.create_task(users.run(num_users))
        for start in range(2, 2 + rounds):
            code, said = await restart_all(mesh)
            print(said)
            assert code == 0, said
            back = [line.partition(":")[0] for line in said.splitlines()]
            assert back == ["decode-0", "decode-1", "prefill-0", "prefill-1", "broker", "nats", "router"]
            assert said.count(f": back, start {start}, ") == len(back)
        users.enough.set()
    print(f"{len(users.all)} requests, none failed; the router refused {users.num_refused} times")
    assert len(users.all) > num_users
    different = {(*prompt, *answer.token_ids): at for at, (prompt, answer) in enumerate(users.all)}
    assert all(len(answer.token_ids) == NEW_TOKENS for _, answer in users.all)
    once = [users.all[at] for at in different.values()]
    check_answers(reference, [prompt for prompt, _ in once], [answer for _, answer in once])
    mesh.read_record()
    assert not set(before.values()) & set(mesh.pids.values())
    await mesh.until_instances(4)
    await mesh.check_idle()


def run_roll(tmp_path: Path, num_users: int, rounds: int) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    with mesh_of(tmp_path, model, 2) as mesh:
        asyncio.run(roll(mesh, load_reference(model), num_users, rounds))
        said = "".join(mesh.output)
    assert "error:" not in said


def test_no_request_fails_while_all_is_started_again(tmp_path: Path) -> None:
    run_roll(tmp_path, num_users=4, rounds=1)


@pytest.mark.full
def test_no_request_fails_while_all_is_started_again_and_again_under_more_load(tmp_path: Path) -> None:
    run_roll(tmp_path, num_users=16, rounds=3)
