"""The faults of the in-memory twin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from stagemesh.shared.errors import PeerLost, Rejected, Retryable
from stagemesh.shared.transfer.base import Lane, Piece, RegionKey, TransferState
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.memory import MemoryEndpoint, MemoryFabric

BATCH, NUM_BATCHES = 16, 4


class Bench:
    """A writer and a target of NUM_BATCHES batches each."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.writer = MemoryEndpoint(self.fabric, "writer", max_batch_bytes=BATCH)
        self.target = MemoryEndpoint(self.fabric, "target")
        self.source = torch.ones(BATCH * NUM_BATCHES, dtype=torch.uint8)
        self.memory = torch.zeros(BATCH * NUM_BATCHES, dtype=torch.uint8)
        self.address = self.writer.register(self.source).address
        self.key: RegionKey = self.target.publish(self.target.register(self.memory))

    def write(self, num_batches: int = NUM_BATCHES, lane: Lane = Lane.BULK) -> Transfer:
        return self.writer.write(self.key, [Piece(self.address, self.key.address, num_batches * BATCH)], lane)

    @property
    def num_applied(self) -> int:
        return int(self.memory.sum()) // BATCH


def run(body: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        async with asyncio.timeout(10):
            await body(bench)
            await bench.writer.close()
            await bench.target.close()
        assert not bench.fabric.endpoints

    asyncio.run(main())


@pytest.mark.parametrize("proven", [True, False])
def test_the_next_writes_fail_on_demand(proven: bool) -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.faults.fail_next(2, proven=proven)
        for _ in range(2):
            handle = bench.write(1)
            with pytest.raises(Retryable, match="on demand"):
                await handle.wait()
            assert (handle.state, handle.quiescent) == (TransferState.FAILED, proven)
        assert bench.num_applied == 0
        await bench.write(1).wait()
        assert bench.num_applied == 1

    run(body)


def test_a_held_batch_is_in_flight_until_it_is_released() -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.hold(after_batches=1)
        handle = bench.write()
        await bench.fabric.faults.parked.wait()
        handle.cancel()
        assert (handle.state, handle.quiescent, bench.num_applied) == (TransferState.ACTIVE, False, 1)
        bench.fabric.release()
        assert await handle.settle() is TransferState.CANCELLED
        # What was in flight when the cancel came has been applied; nothing after it was sent.
        assert (handle.quiescent, bench.num_applied, handle.bytes_done) == (True, 2, 2 * BATCH)

    run(body)


def test_release_lets_everything_through() -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.hold()
        handle = bench.write()
        await bench.fabric.faults.parked.wait()
        assert bench.num_applied == 0
        bench.fabric.release()
        await handle.wait()
        assert bench.num_applied == NUM_BATCHES
        assert not bench.fabric.faults.parked.is_set()

    run(body)


def test_an_urgent_write_overtakes_bulk_ones() -> None:
    async def body(bench: Bench) -> None:
        bulk, urgent = bench.write(), bench.write(1, Lane.URGENT)
        await urgent.wait()
        assert bulk.state in (TransferState.QUEUED, TransferState.ACTIVE)
        await bulk.wait()

    run(body)


def test_a_target_that_is_lost_or_closed_while_a_write_runs() -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.hold(after_batches=1)
        handle = bench.write()
        await bench.fabric.faults.parked.wait()
        bench.fabric.faults.lose("target")
        bench.fabric.release()
        with pytest.raises(PeerLost):
            await handle.wait()
        assert bench.num_applied == 1
        bench.fabric.faults.lost.clear()
        await bench.target.close()
        with pytest.raises(PeerLost):
            await bench.write().wait()

    run(body)


def test_close_waits_for_what_is_in_flight() -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.hold()
        handle = bench.write()
        await bench.fabric.faults.parked.wait()
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(bench.writer.close())
            await asyncio.sleep(0)
            assert not closing.done()
            bench.fabric.release()
        assert (handle.state, handle.quiescent) == (TransferState.CANCELLED, True)

    run(body)


def test_names_are_unique() -> None:
    fabric = MemoryFabric()
    MemoryEndpoint(fabric, "a")
    with pytest.raises(Rejected, match="taken"):
        MemoryEndpoint(fabric, "a")
