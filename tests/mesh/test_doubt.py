"""Connections of the only prefill instance break again and again while it writes: no request suffers, it stays while
it is busy, and once it is not it ends by itself, which frees every page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.mesh.test_exact_tiny import CHUNK, PAGE, load_reference, prompts
from tests.support.cut import cut, tcp_ports
from tests.support.fault_cases import Outcome
from tests.support.faults import Streams, epoch_of, until_proven
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
COUNT, NEW_TOKENS, VICTIM = 16, 32, "prefill-0/1"
SPARED = "the only instance of its role has writes in doubt"


async def cut_again_and_again(mesh: RunningMesh, streams: Streams) -> None:
    """Until a write has come to be in doubt, and the broker has said so."""
    victim = mesh.pids[VICTIM]
    ports = frozenset[int]().union(*(tcp_ports(pid) for name, pid in mesh.pids.items() if name.startswith("decode-")))
    while streams.over < COUNT and not any(SPARED in line for line in mesh.output):
        await streams.moved.wait()
        streams.moved.clear()
        cut(victim, lambda peer: isinstance(peer, tuple) and peer[1] in ports)


@pytest.mark.parametrize("transfer", ["mooncake", "nixl"])
def test_the_only_instance_with_writes_in_doubt_ends_once_it_is_idle(tmp_path: Path, transfer: str) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    reference = load_reference(model)
    wanted = prompts(COUNT, reference.config.vocab_size)
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "256"]
    options = ["--model", str(model), "--dtype", "float64", "--transfer", transfer, *sizes]
    environ = {
        "STAGEMESH_BROKER__MAX_DOUBTFUL_SHARE": "1",
        "STAGEMESH_TRANSFER__PROTOCOL": "tcp",
        "STAGEMESH_ROUTER__MAX_ATTEMPTS": "50",  # there is nowhere else to run, and the link breaks all the time
    }

    async def run(mesh: RunningMesh) -> None:
        await mesh.until_instances(2)
        broker = (await mesh.peers())["broker"]
        epoch, before = await epoch_of("prefill-0", broker), mesh.pids
        streams = Streams(mesh, wanted, NEW_TOKENS)
        async with asyncio.TaskGroup() as group:
            group.create_task(streams.run("doubt"))
            await cut_again_and_again(mesh, streams)
        await asyncio.to_thread(mesh.until_said, SPARED)  # and no more yet, as the reason for its end tells
        assert [streams.outcome(at, reference) for at in range(COUNT)] == [Outcome.EXACT] * COUNT, streams.errors
        assert await until_proven(mesh, "prefill-0", epoch, broker, instances=2)
        await mesh.until_back("prefill-0")
        await mesh.check_idle()
        assert {name.partition("/")[0] for name, pid in mesh.pids.items() if pid != before[name]} == {"prefill-0"}
        streams = Streams(mesh, wanted, NEW_TOKENS)
        await streams.run("after")
        assert [streams.outcome(at, reference) for at in range(COUNT)] == [Outcome.EXACT] * COUNT, streams.errors

    with running_mesh(tmp_path, *options, environ=environ) as mesh:
        asyncio.run(run(mesh))
    assert any('"reason":"idle"' in line for line in mesh.output)
