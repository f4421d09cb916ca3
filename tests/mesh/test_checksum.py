"""Wrong bytes arrive from the real transfer engine: with checksums nobody is answered from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Retryable
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, PAGE, load_reference, prompts
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.corrupting_mesh import CORRUPT
from tests.support.reference import check_greedy
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
COUNT, NEW_TOKENS, WRONG_WRITES = 8, 12, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


def mesh_of(tmp_path: Path, model: Path, wrong_writes: int) -> Any:
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "400"]
    environ = {"STAGEMESH_TRANSFER__KV_CHECKSUM": "true", CORRUPT: str(wrong_writes)}
    options = ["--model", str(model), "--dtype", "float64", *sizes]
    return running_mesh(tmp_path, *options, environ=environ, module="tests.support.corrupting_mesh")


async def ask(mesh: RunningMesh, wanted: list[list[int]]) -> list[Answer]:
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        requests = [token_request(prompt, NEW_TOKENS, ignore_eos=True) for prompt in wanted]
        tasks = [group.create_task(generate(client, request)) for request in requests]
    return [task.result() for task in tasks]


def test_a_request_whose_kv_is_corrupt_runs_again_and_is_answered_exactly(tmp_path: Path, model: Path) -> None:
    reference = load_reference(model)
    wanted = prompts(COUNT, reference.config.vocab_size)[:COUNT]
    with mesh_of(tmp_path, model, WRONG_WRITES) as mesh:
        answers = asyncio.run(ask(mesh, wanted))
        asyncio.run(mesh.check_idle())
        said = "".join(mesh.output)
    for prompt, answer in zip(wanted, answers, strict=True):
        check_greedy(reference, prompt, answer.token_ids)
        assert (answer.reason, len(answer.token_ids)) == ("length", NEW_TOKENS)
    assert "KV is corrupt" in said
    assert "are not what was sent" in said


@pytest.mark.full
def test_a_request_whose_kv_is_always_corrupt_ends_with_the_reason(tmp_path: Path, model: Path) -> None:
    async def run(mesh: RunningMesh) -> None:
        async with Client(mesh.router, GENERATOR) as client:
            with pytest.raises(Retryable, match=r"are not what was sent.*that was the last of 3 attempts"):
                await generate(client, token_request(range(4, 40), NEW_TOKENS, ignore_eos=True))
        await mesh.check_idle()

    with mesh_of(tmp_path, model, 1 << 30) as mesh:
        asyncio.run(run(mesh))
