"""crc32 of pieces of KV: of what is sent, by its writer, and of what has arrived, by the stage that was written to.

A piece is the layers of one leg of one page. It is summed on threads beside the loop, which must not change it
meanwhile: a writer's pages are pinned until it has reported, a target's belong to the ticket. If that has ended
meanwhile, they may be another's, and what is found of them is nobody's: so the head, which knows, says what is corrupt.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stagemesh.shared.codec.arrays import to_tuple
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import mesh_pb2

PAGES_AT_ONCE: Final = 64  # copied from a GPU


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many pieces of a check are not what was sent, and which, in words."""

    num_wrong: int = 0
    error: str = ""


class Checksums:
    """Of one stage's pool, [num_pages, len(layers), 2, page_size, kv_heads, head_dim]."""

    def __init__(self, pool: Tensor, layers: LayerRange) -> None:
        self._pool, self._layers = pool, layers
        self.num_checked = 0

    async def of(self, pages: Sequence[int], layers: LayerRange) -> tuple[int, ...]:
        """One a page. Raises ProtocolViolation for what is not in this pool."""
        inside = self._layers.lo <= layers.lo < layers.hi <= self._layers.hi
        if not inside or not all(0 <= page < len(self._pool) for page in pages):
            raise ProtocolViolation(f"layers [{layers.lo}, {layers.hi}) of pages {list(pages)} are not of this stage")
        return await asyncio.to_thread(self._sum, tuple(pages), layers)

    async def verify(self, check: mesh_pb2.KvCheck) -> Verdict:
        """Of the pieces of `check`."""
        layers, pages = LayerRange(check.layers.lo, check.layers.hi), to_tuple(check.pages)
        found, sent = await self.of(pages, layers), tuple(check.crcs)
        self.num_checked += len(pages)
        wrong = [at for at, crc in enumerate(found) if at >= len(sent) or crc != sent[at]]
        if not wrong:
            return Verdict()
        at = wrong[0]
        expected = f"{sent[at]:08x}" if at < len(sent) else "none"
        return Verdict(
            len(wrong),
            f"{len(wrong)} of {len(pages)} pieces of layers [{layers.lo}, {layers.hi}) are not what was sent: "
            f"page {pages[at]} has crc32 {found[at]:08x}, expected {expected}",
        )

    def _sum(self, pages: tuple[int, ...], layers: LayerRange) -> tuple[int, ...]:
        lo, hi = layers.lo - self._layers.lo, layers.hi - self._layers.lo
        sums: list[int] = []
        if not self._pool.is_cuda:
            return tuple(zlib.crc32(_bytes_of(self._pool[page, lo:hi])) for page in pages)
        aside = torch.cuda.Stream(self._pool.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside):  # the default one would wait for the steps
            for first in range(0, len(pages), PAGES_AT_ONCE):
                some = pages[first : first + PAGES_AT_ONCE]
                copies = torch.stack([self._pool[page, lo:hi] for page in some]).cpu()
                sums += [zlib.crc32(_bytes_of(copy)) for copy in copies]
        return tuple(sums)


def _bytes_of(piece: Tensor) -> memoryview:
    return piece.reshape(-1).view(torch.uint8).numpy().data
