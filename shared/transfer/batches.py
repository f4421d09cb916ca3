"""Pieces of one write, checked and cut into batches of bounded size. Pure.

pieces --check--> inside one source region and the peer's range --join--> fewer, longer pieces --cut--> batches
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.transfer.base import Piece, Region, RegionKey


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call of the backend sends: parallel lists of absolute addresses and lengths in bytes."""

    sources: list[int]
    targets: list[int]
    lengths: list[int]
    num_bytes: int

    def __len__(self) -> int:
        return len(self.lengths)


def check_pieces(pieces: Iterable[Piece], key: RegionKey, regions: Sequence[Region]) -> None:
    """Raises ProtocolViolation for a piece that is empty, or not inside one of `regions` and inside `key`'s range."""
    region = None
    for piece in pieces:
        if piece.length <= 0:
            raise ProtocolViolation(f"a piece must have at least 1 byte: {piece}")
        if not key.covers(piece.target, piece.length):
            raise ProtocolViolation(f"target outside of the peer's region: {piece}, {key}")
        if region is None or not region.covers(piece.source, piece.length):
            region = next((held for held in regions if held.covers(piece.source, piece.length)), None)
            if region is None:
                raise ProtocolViolation(f"source outside of every registered region: {piece}")


def join_neighbours(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in fewer pieces: one that goes on where the one before it ends, on both sides, is joined to it.

    A piece costs a round trip whatever its length, so a run of consecutive pages should travel as one.
    """
    run: Piece | None = None
    for piece in pieces:
        if run is None:
            run = piece
        elif piece.source - run.source == piece.target - run.target == run.length:
            run = Piece(run.source, run.target, run.length + piece.length)
        else:
            yield run
            run = piece
    if run is not None:
        yield run


def cut(pieces: Iterable[Piece], *, max_bytes: int, max_pieces: int) -> list[Batch]:
    """Batches of at most `max_bytes` and `max_pieces`; a longer piece is split. No pieces, no batches."""
    batches: list[Batch] = []
    sources: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    room = max_bytes

    def close_batch() -> None:
        nonlocal sources, targets, lengths, room
        batches.append(Batch(sources, targets, lengths, max_bytes - room))
        sources, targets, lengths, room = [], [], [], max_bytes

    for piece in pieces:
        offset = 0
        while offset < piece.length:
            if not room or len(lengths) == max_pieces:
                close_batch()
            length = min(piece.length - offset, room)
            sources.append(piece.source + offset)
            targets.append(piece.target + offset)
            lengths.append(length)
            offset += length
            room -= length
    if lengths:
        close_batch()
    return batches
