"""An instance is drained and taken back while requests come: none fails, and a drained one gets no new ones."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from stagemesh.shared.errors import Unreachable
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_observe import metrics_addresses
from tests.mesh.test_recovery import NEW_TOKENS, check_answers, mesh_of
from tests.mesh.test_steer import command, stagemesh
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import STOP_LIMIT_S, RunningMesh, running_mesh
from tests.support.scrape import scrape_after
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
ROLES = ("decode", "prefill")


async def ask_all(mesh: RunningMesh, wanted: list[list[int]]) -> list[Answer]:
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        requests = [token_request(prompt, NEW_TOKENS, ignore_eos=True) for prompt in wanted]
        tasks = [group.create_task(generate(client, request)) for request in requests]
    return [task.result() for task in tasks]


async def steps(mesh: RunningMesh, process: str) -> int:
    return int((await mesh.check())[process].gauges["steps_done"])


async def drain(mesh: RunningMesh, instance: str) -> str:
    process = await asyncio.create_subprocess_exec(*command(mesh, "drain", instance), stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


async def drained_under_load(mesh: RunningMesh, instance: str, wanted: list[list[int]]) -> list[Answer]:
    """Those that come while it is drained and before."""
    async with asyncio.TaskGroup() as group:
        before = group.create_task(ask_all(mesh, wanted[::2]))
        draining = group.create_task(drain(mesh, instance))
    assert draining.result() == f"{instance}: idle, and takes no new requests\n"
    done = await steps(mesh, f"{instance}/0")
    after = await ask_all(mesh, wanted[1::2])
    assert await steps(mesh, f"{instance}/0") == done, "it was sent something"
    answers: list[Answer] = [Answer()] * len(wanted)
    answers[::2], answers[1::2] = before.result(), after
    return answers


def test_a_drained_instance_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    reference = load_reference(model)
    wanted = prompts(16, reference.config.vocab_size)
    with mesh_of(tmp_path, model, 2) as mesh:
        for role in ROLES:
            answers = asyncio.run(drained_under_load(mesh, f"{role}-0", wanted))
            check_answers(reference, wanted, answers)
            asyncio.run(mesh.check_idle())
            assert stagemesh(mesh, "resume", f"{role}-0").returncode == 0
        for role in ROLES:  # with the other one drained, all must go to the one that was taken back
            assert stagemesh(mesh, "drain", f"{role}-1").returncode == 0
        check_answers(reference, wanted, asyncio.run(ask_all(mesh, wanted)))


@pytest.mark.full
def test_what_is_not_through_in_time_is_said_and_runs_on(tmp_path: Path) -> None:
    async def run(mesh: RunningMesh) -> Answer:
        late: list[str] = []

        def took(so_far: Answer) -> bool:
            if not late:
                done = stagemesh(mesh, "drain", "decode-0", "--timeout", "0")
                late.append(done.stdout)
                assert done.returncode == 1
            return True

        async with Client(mesh.router, GENERATOR) as client:
            answer = await generate(client, token_request(range(4, 20), 200, ignore_eos=True), on_response=took)
        assert "decode-0: takes no new requests, but is not idle after 0 s" in late[0]
        return answer

    with mesh_of(tmp_path, make_tiny(tmp_path / "model", max_context=256), 1) as mesh:
        assert len(asyncio.run(run(mesh)).token_ids) == 200


def test_a_prefill_instance_goes_while_what_it_has_begun_is_decoded(tmp_path: Path) -> None:
    """It is through with its KV. The request neither fails nor runs again."""
    longest = 4096

    async def run(mesh: RunningMesh) -> None:
        has_begun, is_over = asyncio.Event(), False

        def took(so_far: Answer) -> bool:
            has_begun.set()
            return True

        async def ask() -> Answer:
            nonlocal is_over
            async with Client(mesh.router, GENERATOR) as client:
                request = token_request(range(4, 20), longest - 16, ignore_eos=True)
                answer = await generate(client, request, on_response=took)
            is_over = True
            return answer

        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask())
            await has_begun.wait()
            assert await drain(mesh, "prefill-0") == "prefill-0: idle, and takes no new requests\n"
            assert not is_over
            os.kill(mesh.pids["prefill-0/0"], signal.SIGTERM)
            await mesh.until_instances(1)
            assert not is_over
            await mesh.until_back("prefill-0")
        assert len(asking.result().token_ids) == longest - 16
        router = await scrape_after(metrics_addresses(mesh)["router"], time.time())
        assert router.value("more_attempts_total") == 0

    model = make_tiny(tmp_path / "model", max_context=longest)
    with running_mesh(tmp_path, "--model", str(model)) as mesh:
        asyncio.run(run(mesh))
    assert "work was cut off" not in "".join(mesh.output)


def test_what_is_cut_off_at_the_end_is_told_and_counted_and_makes_the_exit_code(tmp_path: Path) -> None:
    count, longest = 3, 4096

    async def run(mesh: RunningMesh) -> None:
        begun: set[int] = set()

        async def ask(client: Client, at: int) -> None:
            def took(so_far: Answer) -> bool:
                begun.add(at)
                if len(begun) == count:
                    begun.add(-1)
                    mesh.process.send_signal(signal.SIGTERM)
                return True

            request = token_request(range(4 + at, 20 + at), longest - 16, ignore_eos=True)
            with pytest.raises(Unreachable):
                await generate(client, request, on_response=took)

        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            for at in range(count):
                group.create_task(ask(client, at))

    model = make_tiny(tmp_path / "model", max_context=longest)
    environ = {"STAGEMESH_ENGINE__DRAIN_TIMEOUT_S": "0.3"}
    with running_mesh(tmp_path, "--model", str(model), environ=environ) as mesh:
        asyncio.run(run(mesh))
        mesh.exit_code = 1
        mesh.process.wait(STOP_LIMIT_S)
    said = "".join(mesh.output)
    assert f"error: router exited with status 1 (cut off: requests {count}) while stopping" in said
    assert f'"msg":"work was cut off","requests":{count}' in said
    assert "Traceback" not in said
