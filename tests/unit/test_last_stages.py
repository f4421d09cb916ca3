"""Last stages that are to prepare for a structure, and are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stagemesh.services.router.last_stages import LastStages, StageLost
from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.stage.head import INSTANCE
from tests.support.doubles import Partial
from tests.support.instances import DECODE, PREFILL, instance_of, with_last_stage

STRUCTURE = Structure("regex", "a*")
LIMIT_S = 30.0


class Stage(Partial):
    """Takes its time."""

    def __init__(self) -> None:
        self.compiling = asyncio.Event()

    async def PrepareStructure(  # noqa: N802
        self, request: instance_pb2.PrepareStructureRequest, context: Any
    ) -> instance_pb2.PrepareStructureReply:
        self.compiling.set()
        await asyncio.get_running_loop().create_future()
        return instance_pb2.PrepareStructureReply()


class Pair:
    """Two instances, and their last stages."""

    def __init__(self, folder: Path) -> None:
        infos = (instance_of("p", PREFILL), instance_of("d", DECODE))
        self.infos = [with_last_stage(info, f"unix:{folder}/{info.ref.name}") for info in infos]
        self.stages = [Stage() for _ in self.infos]
        self.servers = [Server({INSTANCE: stage}) for stage in self.stages]


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Pair, LastStages]]:
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        there, calls = Pair(folder), LastStages()
        for info, server in zip(there.infos, there.servers, strict=True):
            await server.start(info.stages[-1].address)
            stack.push_async_callback(server.stop)
        stack.push_async_callback(calls.close)
        yield there, calls


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # a short path: of unix sockets


@pytest.mark.parametrize("how", ["it has left the directory", "it has died", "it was dead"])
def test_who_waits_for_a_stage_is_told_of_which_instance_it_was(folder: Path, how: str) -> None:
    async def go() -> None:
        async with pair(folder) as (there, calls):
            if how == "it was dead":
                await there.servers[1].stop()
            preparing = asyncio.create_task(calls.prepare(there.infos, STRUCTURE))
            if how != "it was dead":
                await there.stages[1].compiling.wait()
            if how == "it has died":
                await there.servers[1].stop()
            if how == "it has left the directory":
                await calls.keep(there.infos[:1])
            with pytest.raises(StageLost) as told:
                await preparing
            assert told.value.instance.name == "d"

    asyncio.run(go())
