"""What every backend between processes does when one of them dies, and what it costs the process that it runs in."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stagemesh.shared.errors import PeerLost, Retryable
from stagemesh.shared.transfer.base import Endpoint, Lane, Piece, TransferState
from tests.unit.transfer_target import BETWEEN_PROCESSES, MIB, TargetProcess, capabilities, digest, open_backend
from tests.unit.transfer_writer import WriterProcess

GIB = 1 << 30
LEARNS_WITHIN_S = 1.0
MEMORY_NOISE = 24 * MIB  # what an allocator may keep, however many peers have died
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.slow


@pytest.fixture(params=BETWEEN_PROCESSES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gigabyte() -> torch.Tensor:
    return torch.ones(GIB, dtype=torch.uint8)


@asynccontextmanager
async def opened(backend: str, max_batch_bytes: int = 4 * MIB) -> AsyncIterator[Endpoint]:
    endpoint = open_backend(backend, max_batch_bytes)
    try:
        yield endpoint
    finally:
        await endpoint.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


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


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds: files and sockets, threads of any kind, bytes of host memory."""

    files: int
    threads: int
    num_bytes: int


def held_now() -> Held:
    return Held(num_files(), len(os.listdir("/proc/self/task")), resident_bytes())


async def returned_to(before: Held) -> Held:
    """What is held once no more files are open than `before`: a library closes those of a dead peer in its own time."""
    while (held := held_now()).files > before.files:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    return held


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
        assert held.threads == before.threads
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


@pytest.mark.full
def test_a_target_that_is_stopped_fails_a_write_in_doubt_if_it_has_to_read_it(backend: str) -> None:
    target = TargetProcess(32 * MIB, backend)

    async def main() -> None:
        async with opened(backend) as writer, asyncio.timeout(120):
            region = writer.register(torch.ones(32 * MIB, dtype=torch.uint8))
            whole = Piece(region.address, target.key.address, 32 * MIB)
            await writer.write(target.key, [Piece(region.address, target.key.address, 1)]).wait()
            target.stop()
            handle = writer.write(target.key, [whole])
            passes = capabilities(backend).reap_ends_writes  # the writer itself copies into the target's memory
            assert await handle.settle() is (TransferState.DONE if passes else TransferState.FAILED)
            assert handle.quiescent is passes
            target.process.send_signal(signal.SIGCONT)
            await writer.write(target.key, [whole]).wait()
            assert target.count() == 32 * MIB

    try:
        asyncio.run(main())
    finally:
        target.close()


@pytest.mark.full
def test_a_gigabyte_arrives_whole(backend: str) -> None:
    source = torch.randint(0, 256, (GIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    target = TargetProcess(GIB, backend)

    async def main() -> None:
        async with opened(backend) as writer, asyncio.timeout(120):
            region = writer.register(source)
            await writer.write(target.key, [Piece(region.address, target.key.address, GIB)]).wait()
        assert target.digest(0, GIB) == digest(source, 0, GIB)

    try:
        asyncio.run(main())
    finally:
        target.close()


def test_what_is_no_longer_registered_takes_no_write_where_the_backend_can_revoke(backend: str) -> None:
    target = TargetProcess(2 * MIB, backend)

    async def main() -> None:
        async with opened(backend) as writer, asyncio.timeout(60):
            region = writer.register(torch.ones(MIB, dtype=torch.uint8))
            await writer.write(target.key, [Piece(region.address, target.key.address, MIB)]).wait()
            target.revoke()
            late = writer.write(target.key, [Piece(region.address, target.key.address + MIB, MIB)])
            state = await late.settle()
        revoked = capabilities(backend).revokes
        assert state is (TransferState.FAILED if revoked else TransferState.DONE)
        assert target.count() == (MIB if revoked else 2 * MIB)

    try:
        asyncio.run(main())
    finally:
        target.close()


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
    before = held_now()
    kept = asyncio.run(failed())
    assert isinstance(kept, PeerLost)
    assert held_now().files <= before.files
    assert held_now().threads <= before.threads


def test_writers_of_several_processes_do_not_disturb_each_other(backend: str) -> None:
    num_writers, share = 3, 16 * MIB
    with ExitStack() as stack:
        target = TargetProcess(num_writers * share, backend)
        stack.callback(target.close)
        writers = []
        for index in range(num_writers):
            writer = WriterProcess(backend, target.key, offset=index * share, num_bytes=share, byte=index + 1)
            stack.callback(writer.close)
            writers.append(writer)
        for writer in writers:
            writer.hear("writing")
        for writer in writers:
            writer.tell("once")
        for writer in writers:
            writer.hear("done")
        for index in range(num_writers):
            assert target.only(index * share, share) == index + 1


def test_a_writer_that_was_killed_and_reaped_disturbs_nobody(backend: str) -> None:
    num_bytes = 32 * MIB
    with ExitStack() as stack:
        target = TargetProcess(num_bytes, backend)
        stack.callback(target.close)
        writer = WriterProcess(backend, target.key, offset=0, num_bytes=num_bytes, byte=2)
        stack.callback(writer.close)
        writer.hear("writing")
        writer.tell("for good")
        while target.count() < 2:  # it is in the middle of its first round
            pass
        writer.close()
        if capabilities(backend).reap_ends_writes:  # else the target may still be reading what was sent
            first = target.count()
            target.clear()
            assert first > 0
            assert target.count() == 0
        other = WriterProcess(backend, target.key, offset=num_bytes - MIB, num_bytes=MIB, byte=3)
        stack.callback(other.close)
        other.hear("writing")
        other.tell("once")
        other.hear("done")
        assert target.only(num_bytes - MIB, MIB) == 3


def test_the_loop_runs_on_while_batches_of_many_megabytes_are_sent(backend: str, gigabyte: torch.Tensor) -> None:
    target = TargetProcess(GIB, backend)

    async def main() -> None:
        async with opened(backend, max_batch_bytes=256 * MIB) as writer, asyncio.timeout(60):
            region = writer.register(gigabyte)
            await writer.write(target.key, [Piece(region.address, target.key.address, 1)]).wait()
            lags, started = [], time.monotonic()
            handle = writer.write(target.key, [Piece(region.address, target.key.address, GIB)])
            while handle.state in (TransferState.QUEUED, TransferState.ACTIVE):
                before = time.monotonic()
                await asyncio.sleep(1e-3)
                lags.append(time.monotonic() - before - 1e-3)
            took_s = time.monotonic() - started
            assert handle.state is TransferState.DONE
            lags.sort()
            print(f"{backend}: {took_s:.2f} s, lag median {lags[len(lags) // 2] * 1e3:.1f} ms, worst {lags[-1]:.3f} s")
            assert lags[len(lags) // 2] < 0.01
            assert lags[-1] < took_s / 4  # a batch is a quarter: none held the loop
            assert target.count() == GIB

    try:
        asyncio.run(main())
    finally:
        target.close()


def test_many_writes_keep_no_memory_and_no_thread(backend: str) -> None:
    num_bytes = 8 * MIB
    target = TargetProcess(num_bytes, backend)

    async def main(rounds: int) -> int:
        async with opened(backend) as writer, asyncio.timeout(60):
            region = writer.register(torch.ones(num_bytes, dtype=torch.uint8))
            pieces = [Piece(region.address + i, target.key.address + i, 4096) for i in range(0, num_bytes, 8192)]
            for _ in range(rounds):
                await writer.write(target.key, pieces).wait()
                await writer.write(target.key, pieces[:1], Lane.URGENT).wait()
            return resident_bytes()

    try:
        asyncio.run(main(1))  # whatever the library keeps for good is there after the first
        num_threads, files, early = len(os.listdir("/proc/self/task")), num_files(), resident_bytes()
        late = asyncio.run(main(20))
        assert late - early < num_bytes + 16 * MIB
        assert len(os.listdir("/proc/self/task")) <= num_threads
        assert num_files() <= files
    finally:
        target.close()
