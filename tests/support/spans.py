"""What writers report, in short."""

from __future__ import annotations

from collections.abc import Iterable

from stagemesh.services.broker.ticket import PieceSpan


def spans_of(pieces: Iterable[tuple[int, int, int]]) -> tuple[PieceSpan, ...]:
    """Of (target, first page, last page)."""
    return tuple(PieceSpan(target, first, last) for target, first, last in pieces)
