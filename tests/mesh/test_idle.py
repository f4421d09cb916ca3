"""A mesh that nobody has asked for minutes answers at once, and its second batch is like its first."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, PAGE
from tests.support.client import GENERATOR, generate, token_request
from tests.support.running import running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.full
SILENCE_S, BATCH, NEW_TOKENS = 300.0, 100, 24


async def ask(client: Client, count: int) -> float:
    """Seconds that `count` requests at once took. Fails unless each has all its tokens."""
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        requests = [token_request(range(4, 20 + n), NEW_TOKENS, ignore_eos=True) for n in range(count)]
        tasks = [group.create_task(generate(client, request)) for request in requests]
    assert all(len(task.result().token_ids) == NEW_TOKENS for task in tasks)
    return time.monotonic() - start_s


def test_after_minutes_of_silence_a_request_works_at_once_and_batches_are_alike(tmp_path: Path) -> None:
    async def run(router: str) -> None:
        async with Client(router, GENERATOR) as client:
            before = await ask(client, 1)
            # silence is what is tested: connections idle past every keepalive
            await silence()
            after = await ask(client, 1)
            first, second = await ask(client, BATCH), await ask(client, BATCH)
        print(f"one request: {before:.3f} s before, {after:.3f} s after {SILENCE_S:.0f} s of silence")
        print(f"{BATCH} requests: {first:.2f} s, then {second:.2f} s: ratio {second / first:.2f}")

    model = make_tiny(tmp_path / "model", max_context=256)
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "600", "--max-running", "32"]
    with running_mesh(tmp_path, "--model", str(model), "--dtype", "float64", *sizes) as mesh:
        asyncio.run(run(mesh.router))
        asyncio.run(mesh.check_idle())


async def silence() -> None:
    try:
        async with asyncio.timeout(SILENCE_S):
            await asyncio.Event().wait()
    except TimeoutError:
        pass
