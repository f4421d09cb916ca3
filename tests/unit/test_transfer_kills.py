"""What a target that is killed costs a writer: it learns of it at once, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from stagemesh.shared.errors import PeerLost, Retryable
from stagemesh.shared.transfer.base import Endpoint, Lane, Piece, TransferState
from tests.unit.transfer_held import held_in_a_loop, held_now, opened, returned_to
from tests.unit.transfer_target import BETWEEN_PROCESSES, MIB, TargetProcess

GIB = 1 << 30
LEARNS_WITHIN_S = 1.0
MEMORY_NOISE = 24 * MIB  # what an allocator may keep, however many peers have died

pytestmark = pytest.mark.slow


@pytest.fixture(params=BETWEEN_PROCESSES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gigabyte() -> torch.Tensor:
    return torch.ones(GIB, dtype=torch.uint8)


@contextmanager
def death_of(process: subprocess.Popen[str]) -> Iterator[asyncio.Future[float]]:
    """When it ended, by the clock. The kernel takes a while to take back a gigabyte, and closes sockets after that."""
    loop, handle = asyncio.get_running_loop(), os.pidfd_open(process.pid)
    died: asyncio.Future[float] = loop.create_future()

    def on_exit() -> None:
        loop.remove_reader(handle)
        died.set_result(time.monotonic())

    loop.add_reader(handle, on_exit)
    try:
        yield died
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def kill_in_the_middle(writer: Endpoint, memory: torch.Tensor, backend: str) -> float:
    """Seconds from the death of the target to the failure of a write of all of `memory`; 0 if it failed before."""
    target = TargetProcess(memory.numel(), backend)
    try:
        region = writer.register(memory)
        pieces = [Piece(region.address, target.key.address, memory.numel())]
        running = writer.write(target.key, pieces)
        while running.bytes_done < 32 * MIB:
            await asyncio.sleep(0)
            assert running.state in (TransferState.QUEUED, TransferState.ACTIVE), running
        with death_of(target.process) as died:
            target.process.kill()
            with pytest.raises((PeerLost, Retryable)):  # its listener may outlive its connections by a moment
                await running.wait()
            learned = time.monotonic()
            took_s = max(0.0, learned - await died)
        assert running.bytes_done < running.num_bytes
        target.process.wait()
        for lane in Lane:
            again = writer.write(target.key, pieces[:1], lane)
            with pytest.raises(PeerLost):
                await again.wait()
            assert (again.state, again.quiescent) == (TransferState.FAILED, True)
        writer.unregister(region)
    finally:
        target.close()
    return took_s


def check_kills(backend: str, gigabyte: torch.Tensor, rounds: int) -> None:
    async def main() -> None:
        slowest_s = 0.0
        async with opened(backend) as writer:
            await kill_in_the_middle(writer, gigabyte, backend)  # whatever the library keeps for good is there then
            before = held = held_now()
            for _ in range(rounds):
                async with asyncio.timeout(60):
                    slowest_s = max(slowest_s, await kill_in_the_middle(writer, gigabyte, backend))
                    held = await returned_to(before)
        print(f"{backend}: {rounds} kills, the slowest was noticed after {slowest_s:.3f} s; {before}, then {held}")
        assert slowest_s < LEARNS_WITHIN_S
        assert held.num_bytes < before.num_bytes + MEMORY_NOISE

    asyncio.run(main())


def test_a_target_killed_in_the_middle_of_a_gigabyte_is_noticed_at_once(backend: str, gigabyte: torch.Tensor) -> None:
    check_kills(backend, gigabyte, rounds=2)


@pytest.mark.full
def test_fifty_targets_killed_in_the_middle_of_a_gigabyte(backend: str, gigabyte: torch.Tensor) -> None:
    check_kills(backend, gigabyte, rounds=49)


def test_a_target_that_died_while_nothing_ran_is_lost_and_its_successor_is_met(backend: str) -> None:
    target, successor = TargetProcess(MIB, backend), TargetProcess(MIB, backend)

    async def main() -> None:
        async with opened(backend) as writer, asyncio.timeout(60):
            region = writer.register(torch.ones(MIB, dtype=torch.uint8))
            await writer.write(target.key, [Piece(region.address, target.key.address, MIB)]).wait()
            target.close()
            with pytest.raises((PeerLost, Retryable)):
                await writer.write(target.key, [Piece(region.address, target.key.address, MIB)]).wait()
            with pytest.raises(PeerLost):
                await writer.write(target.key, [Piece(region.address, target.key.address, MIB)]).wait()
            await writer.write(successor.key, [Piece(region.address, successor.key.address, MIB)]).wait()
            assert successor.count() == MIB

    try:
        asyncio.run(main())
    finally:
        target.close()
        successor.close()


def test_an_error_that_is_kept_keeps_nothing_open(backend: str) -> None:
    target = TargetProcess(MIB, backend)
    target.close()

    async def failed() -> Exception | None:
        async with opened(backend) as writer, asyncio.timeout(60):
            region = writer.register(torch.ones(MIB, dtype=torch.uint8))
            handle = writer.write(target.key, [Piece(region.address, target.key.address, MIB)])
            await handle.settle()
            return handle.error

    asyncio.run(failed())
    before = asyncio.run(held_in_a_loop())
    kept = asyncio.run(failed())
    assert isinstance(kept, PeerLost)
    asyncio.run(returned_to(before))
