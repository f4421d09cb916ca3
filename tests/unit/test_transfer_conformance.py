"""What every transfer backend does. The memory target is an endpoint beside; the others are another process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch

from stagemesh.shared.errors import Cancelled, PeerLost, ProtocolViolation, Rejected, Retryable
from stagemesh.shared.transfer.base import Endpoint, Lane, Piece, Region, RegionKey, TransferState
from tests.unit.transfer_backends import TARGET_BYTES, Backend, memory_backend, process_backend
from tests.unit.transfer_target import BETWEEN_PROCESSES, digest

MIB = 1 << 20


@pytest.fixture(scope="module", params=["memory", *BETWEEN_PROCESSES])
def shared_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "memory":
        yield memory_backend()
    else:
        with process_backend(request.param) as backend:
            yield backend


@pytest.fixture
def backend(shared_backend: Backend) -> Backend:
    shared_backend.target.clear()
    return shared_backend


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    """Bytes that are never 0, so that the target can count them."""
    return torch.randint(1, 256, (TARGET_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def run(backend: Backend, source: torch.Tensor, body: Callable[[Endpoint, Region], Awaitable[None]]) -> None:
    async def main() -> None:
        writer = backend.open()
        try:
            async with asyncio.timeout(60):
                await body(writer, writer.register(source))
        finally:
            await writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("length", [1, 4096, 3 * MIB + 1, 33 * MIB])
def test_a_write_that_is_done_has_been_applied(backend: Backend, source: torch.Tensor, length: int, lane: Lane) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        piece = Piece(region.address + 5, backend.target.key.address + 11, length)
        handle = writer.write(backend.target.key, [piece], lane)
        assert not handle.quiescent
        await handle.wait()
        assert (handle.state, handle.quiescent, handle.error) == (TransferState.DONE, True, None)
        assert (handle.num_pieces, handle.num_bytes, handle.bytes_done) == (1, length, length)
        assert backend.target.digest(11, length) == digest(source, 5, length)
        assert backend.target.count() == length

    run(backend, source, body)


def test_thousands_of_pieces_land_where_they_belong(backend: Backend, source: torch.Tensor) -> None:
    num_pieces, length = 3000, 1000
    order = list(range(num_pieces))
    random.Random(3).shuffle(order)
    expected = torch.cat([source[i * length : (i + 1) * length] for i in order])

    async def body(writer: Endpoint, region: Region) -> None:
        pieces = [
            Piece(region.address + i * length, backend.target.key.address + to * length, length)
            for to, i in enumerate(order)
        ]
        handle = writer.write(backend.target.key, pieces)
        await handle.wait()
        assert (handle.num_pieces, handle.bytes_done) == (num_pieces, num_pieces * length)
        assert backend.target.digest(0, num_pieces * length) == digest(expected, 0, num_pieces * length)

    run(backend, source, body)


def test_writers_at_once_do_not_disturb_each_other(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        async def write(index: int, lane: Lane) -> None:
            offset = index * MIB
            piece = Piece(region.address + offset, backend.target.key.address + offset, MIB)
            await writer.write(backend.target.key, [piece], lane).wait()

        async with asyncio.TaskGroup() as group:
            for index in range(24):
                group.create_task(write(index, Lane.URGENT if index % 3 else Lane.BULK))
        assert backend.target.digest(0, 24 * MIB) == digest(source, 0, 24 * MIB)

    run(backend, source, body)


def test_what_is_written_after_a_write_was_done_is_what_stays(backend: Backend, source: torch.Tensor) -> None:
    """Each write is seen whole at the target before the next one begins, on whichever lane."""
    num_rounds, length = 12, MIB + 1

    async def body(writer: Endpoint, region: Region) -> None:
        for index in range(num_rounds):
            offset = index * length
            piece = Piece(region.address + offset, backend.target.key.address, length)
            await writer.write(backend.target.key, [piece], list(Lane)[index % 2]).wait()
            assert backend.target.digest(0, length) == digest(source, offset, length)

    run(backend, source, body)


def test_a_write_of_nothing_is_done(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        handle = writer.write(backend.target.key, [])
        assert (handle.state, handle.quiescent) == (TransferState.DONE, True)
        await handle.wait()

    run(backend, source, body)


BAD_PIECES = {
    "before the target": (0, -1, 10),
    "past the target": (0, TARGET_BYTES - 9, 10),
    "before the source": (-1, 0, 10),
    "past the source": (TARGET_BYTES - 9, 0, 10),
    "empty": (0, 0, 0),
    "negative": (10, 10, -5),
}


@pytest.mark.parametrize("bad", BAD_PIECES)
def test_a_piece_out_of_range_is_refused_before_anything_is_sent(
    backend: Backend, source: torch.Tensor, bad: str
) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        key, (from_, to, length) = backend.target.key, BAD_PIECES[bad]
        good = Piece(region.address, key.address, 100)
        with pytest.raises(ProtocolViolation):
            writer.write(key, [good, Piece(region.address + from_, key.address + to, length)])
        assert backend.target.count() == 0

    run(backend, source, body)


def test_a_source_that_is_no_longer_registered_is_refused(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        piece = Piece(region.address, backend.target.key.address, 100)
        writer.unregister(region)
        writer.unregister(region)
        with pytest.raises(ProtocolViolation, match="source"):
            writer.write(backend.target.key, [piece])
        with pytest.raises(Rejected, match="not registered"):
            writer.publish(region)
        assert writer.register(source) == region
        await writer.write(backend.target.key, [piece]).wait()

    run(backend, source, body)


def test_cancel_stops_what_is_not_submitted_and_waits_for_what_is(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        key = backend.target.key
        handle = writer.write(key, [Piece(region.address, key.address, TARGET_BYTES)])
        handle.cancel()
        with pytest.raises(Cancelled):
            await handle.wait()
        assert (handle.state, handle.quiescent) == (TransferState.CANCELLED, True)
        assert backend.target.count() == handle.bytes_done < TARGET_BYTES

    run(backend, source, body)


def test_cancelling_the_waiting_task_does_not_cancel_the_write(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        key = backend.target.key
        handle = writer.write(key, [Piece(region.address, key.address, TARGET_BYTES)])
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(handle.wait())
            await asyncio.sleep(0)
            waiting.cancel()
        assert waiting.cancelled()
        assert await handle.settle() is TransferState.DONE
        assert backend.target.count() == TARGET_BYTES

    run(backend, source, body)


def test_an_endpoint_that_is_not_there_is_lost_and_nothing_was_sent(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        key = RegionKey(backend.lost_name, 4096, 4096)
        for lane in Lane:
            handle = writer.write(key, [Piece(region.address, 4096, 4096)], lane)
            with pytest.raises(PeerLost):
                await handle.wait()
            assert (handle.state, handle.quiescent) == (TransferState.FAILED, True)

    run(backend, source, body)


@pytest.mark.parametrize("lane", Lane)
def test_a_target_that_is_not_registered_fails_and_the_endpoint_works_on(
    backend: Backend, source: torch.Tensor, lane: Lane
) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        key = backend.target.key
        forged = RegionKey(key.endpoint, key.address + key.length - 100, 4096)
        handle = writer.write(forged, [Piece(region.address, forged.address, 4096)], lane)
        with pytest.raises(Retryable):
            await handle.wait()
        assert (handle.state, handle.bytes_done) == (TransferState.FAILED, 0)
        await writer.write(key, [Piece(region.address, key.address, 4096)], lane).wait()
        assert backend.target.count() == 4096

    run(backend, source, body)


def test_the_loop_goes_on_while_a_large_write_runs(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        key, num_turns = backend.target.key, 0
        handle = writer.write(key, [Piece(region.address, key.address, TARGET_BYTES)])
        while handle.state in (TransferState.QUEUED, TransferState.ACTIVE):
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns >= TARGET_BYTES // (4 * MIB)  # no batch held the loop
        assert handle.state is TransferState.DONE

    run(backend, source, body)


def test_what_cannot_be_registered(backend: Backend, source: torch.Tensor) -> None:
    async def body(writer: Endpoint, region: Region) -> None:
        for memory, why in (
            (torch.zeros(4, 4).t(), "not contiguous"),
            (torch.zeros(0), "empty"),
            (source[10:20], "overlaps"),
        ):
            with pytest.raises(Rejected, match=why):
                writer.register(memory)

    run(backend, source, body)


def test_close_cancels_and_then_refuses(backend: Backend, source: torch.Tensor) -> None:
    async def main() -> None:
        writer = backend.open()
        region, key = writer.register(source), backend.target.key
        pieces = [Piece(region.address, key.address, TARGET_BYTES)]
        handle = writer.write(key, pieces)
        await writer.close()
        assert (handle.state, handle.quiescent) == (TransferState.CANCELLED, True)
        with pytest.raises(Retryable, match="closed"):
            writer.write(key, pieces)
        await writer.close()

    asyncio.run(main())
