"""What every backend between processes does when one of them dies, and what it costs the process that it runs in."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack

import pytest
import torch

from stagemesh.shared.transfer.base import Lane, Piece, TransferState
from stagemesh.shared.transfer.sockets import until_sent
from tests.unit.transfer_held import held_in_a_loop, opened, resident_bytes, returned_to
from tests.unit.transfer_target import BETWEEN_PROCESSES, MIB, TargetProcess, capabilities, digest
from tests.unit.transfer_writer import WriterProcess

GIB = 1 << 30

pytestmark = pytest.mark.slow


@pytest.fixture(params=BETWEEN_PROCESSES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gigabyte() -> torch.Tensor:
    return torch.ones(GIB, dtype=torch.uint8)


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
        target.stop()  # where TCP is used, what is on its way now is read after the writer's death
        writer.close()
        target.process.send_signal(signal.SIGCONT)
        if not capabilities(backend).reap_ends_writes:  # the target may still be reading what was sent
            asyncio.run(until_sent())
            target.read_out()
        assert target.count() > 0
        target.clear()
        assert target.count() == 0
        other = WriterProcess(backend, target.key, offset=num_bytes - MIB, num_bytes=MIB, byte=3)
        stack.callback(other.close)
        other.hear("writing")
        other.tell("once")
        other.hear("done")
        assert target.only(num_bytes - MIB, MIB) == 3


def test_a_target_that_died_is_not_waited_for_by_those_that_had_written_to_it(backend: str) -> None:
    """As a prefill instance has that is a decode instance now. Its library may keep the connection for minutes."""
    target = TargetProcess(MIB, backend)

    async def main() -> None:
        async with opened(backend) as writer, asyncio.timeout(30):
            region = writer.register(torch.ones(MIB, dtype=torch.uint8))
            await writer.write(target.key, [Piece(region.address, target.key.address, MIB)]).wait()
            target.close()
            await writer.read_out()

    try:
        asyncio.run(main())
    finally:
        target.close()


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
            # Each batch is a quarter. If they held the loop, three lags would be as long, or one as all of them.
            assert lags[-3] < took_s / 8
            assert lags[-1] < took_s * 3 / 4
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
        before = asyncio.run(held_in_a_loop())
        late = asyncio.run(main(20))
        assert late - before.num_bytes < num_bytes + 16 * MIB
        asyncio.run(returned_to(before))
    finally:
        target.close()
