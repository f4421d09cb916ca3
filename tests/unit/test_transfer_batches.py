"""Joining and cutting change how bytes travel, never which."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.errors import Cancelled, PeerLost, Retryable
from stagemesh.shared.transfer.base import Piece, TransferState
from stagemesh.shared.transfer.batches import Batch, cut, join_neighbours
from stagemesh.shared.transfer.handle import Transfer

PIECES = st.lists(
    st.builds(Piece, source=st.integers(0, 40), target=st.integers(100, 140), length=st.integers(1, 9)), max_size=12
)


def copies(pieces: list[Piece]) -> list[tuple[int, int]]:
    """(source, target) of every byte, in order."""
    return [(piece.source + i, piece.target + i) for piece in pieces for i in range(piece.length)]


def as_pieces(batch: Batch) -> list[Piece]:
    return [Piece(*parts) for parts in zip(batch.sources, batch.targets, batch.lengths, strict=True)]


@settings(deadline=None)
@given(pieces=PIECES)
def test_joining_keeps_every_byte_and_leaves_no_neighbours(pieces: list[Piece]) -> None:
    joined = list(join_neighbours(pieces))
    assert copies(joined) == copies(pieces)
    assert list(join_neighbours(joined)) == joined


@settings(deadline=None)
@given(pieces=PIECES, max_bytes=st.integers(1, 20), max_pieces=st.integers(1, 5))
def test_cutting_keeps_every_byte_within_the_bounds(pieces: list[Piece], max_bytes: int, max_pieces: int) -> None:
    batches = cut(pieces, max_bytes=max_bytes, max_pieces=max_pieces)
    assert copies([piece for batch in batches for piece in as_pieces(batch)]) == copies(pieces)
    for batch in batches:
        assert 1 <= len(batch) <= max_pieces
        assert 1 <= batch.num_bytes == sum(batch.lengths) <= max_bytes


def test_a_run_of_pages_travels_as_one_piece() -> None:
    pages = [Piece(4096 + 64 * page, 8192 + 64 * page, 64) for page in range(100)]
    assert list(join_neighbours(pages)) == [Piece(4096, 8192, 6400)]
    other_order = [Piece(4096 + 64 * page, 8192 - 64 * page, 64) for page in range(100)]
    assert list(join_neighbours(other_order)) == other_order


def transfer_of(num_batches: int) -> tuple[Transfer, list[Transfer]]:
    settled: list[Transfer] = []
    return Transfer(num_pieces=1, num_bytes=10, num_batches=num_batches, on_settled=settled.append), settled


def test_a_transfer_is_queued_active_done() -> None:
    transfer, settled = transfer_of(2)
    assert transfer.state is TransferState.QUEUED
    assert transfer.begin()
    transfer.batch_done(4)
    assert (transfer.state, transfer.quiescent, transfer.bytes_done, settled) == (TransferState.ACTIVE, False, 4, [])
    assert transfer.begin()
    transfer.batch_done(6)
    assert (transfer.state, transfer.quiescent, transfer.error, settled) == (TransferState.DONE, True, None, [transfer])


def test_a_cancel_that_came_too_late_is_done() -> None:
    transfer, _ = transfer_of(1)
    assert transfer.begin()
    transfer.cancel()
    assert not transfer.settled
    transfer.batch_done(10)
    assert transfer.state is TransferState.DONE


def test_a_failure_stops_the_rest_and_outranks_a_cancel() -> None:
    transfer, settled = transfer_of(3)
    assert transfer.begin()
    transfer.cancel()
    transfer.batch_failed(PeerLost("first"), proven=True)
    assert not transfer.begin()
    transfer.batch_skipped()
    assert transfer.state is TransferState.ACTIVE
    transfer.batch_failed(Retryable("second"), proven=True)
    assert (transfer.state, transfer.quiescent, str(transfer.error)) == (TransferState.FAILED, True, "first")
    assert settled == [transfer]


@pytest.mark.parametrize("proven", [True, False])
def test_one_batch_without_proof_is_a_write_without_quiescence(proven: bool) -> None:
    transfer, _ = transfer_of(2)
    transfer.batch_failed(Retryable("x"), proven=proven)
    assert not transfer.quiescent
    transfer.batch_skipped()
    assert transfer.quiescent is proven


def test_a_cancelled_transfer_says_so() -> None:
    transfer, _ = transfer_of(1)
    transfer.cancel()
    assert not transfer.begin()
    transfer.batch_skipped()
    assert (transfer.state, transfer.quiescent) == (TransferState.CANCELLED, True)
    assert isinstance(transfer.error, Cancelled)
