"""How the weights of a decode step lie in memory: as units, contiguous and in the order of reading, so that the copy
engine reads long stretches; and how programs share them.

The tiles * k_units = U units of a matrix are read by P programs: program p takes the units from p*U/P up to (p+1)*U/P,
and so whole tiles or pieces of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from torch import Tensor
from torch.nn.functional import pad

PROCESSORS: Final = 132
"""Multiprocessors of an H100 or H200."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a matrix is cut. width: columns of the result a tile, of gate and up together; depth: elements of K a unit;
    programs: at most as many as run at once; warps: of a program without a gate, for tiles of 64 rows."""

    width: int
    depth: int
    programs: int
    warps: int = 8


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K], or gate above up of [2 * N, K], as units of [width, depth] that are contiguous, in the order in
    which they are read: [tiles * units of a tile * width, depth]. `columns`: N."""

    units: Tensor
    columns: int
    cut: Cut
    paired: bool


def fold_norm(weight: Tensor, norm: Tensor) -> Tensor:
    """`weight` [N, K] such that it takes rows that are only scaled to a mean square of 1; `norm`: [K]."""
    return (weight.float() * norm.float()).to(weight.dtype)


def cut_for(rows: int) -> Cut:
    """The fastest that was measured on an H200, for weights of that many rows: whole tiles or equal pieces of them for
    every program, as long as that keeps most of the multiprocessors busy."""
    tiles, wide_tiles = -(-rows // 128), -(-rows // 256)
    if tiles <= PROCESSORS:
        return Cut(128, 128, min(PROCESSORS // tiles, 8) * tiles)
    return Cut(256, 64, wide_tiles) if wide_tiles <= PROCESSORS else Cut(128, 128, PROCESSORS)


def pack(weight: Tensor, *, paired: bool = False, cut: Cut | None = None) -> PackedWeight:
    """Of `weight` [N, K], or of gate above up [2 * N, K] where `paired`. A copy of it, filled up with zeros."""
    cut, parts = cut or cut_for(len(weight)), 2 if paired else 1
    columns, block_n = len(weight) // parts, cut.width // parts
    tiles, k_units = -(-columns // block_n), -(-weight.shape[1] // cut.depth)
    each = weight.view(parts, columns, -1)
    each = pad(each, (0, k_units * cut.depth - each.shape[2], 0, tiles * block_n - columns))
    each = each.view(parts, tiles, block_n, k_units, cut.depth).permute(1, 3, 0, 2, 4)
    return PackedWeight(each.reshape(-1, cut.depth), columns, cut, paired)


@cache
def most_pieces(tiles: int, k_units: int, programs: int) -> int:
    """Of one tile; `programs`: at most one a unit."""
    units = tiles * k_units

    def of(start: int) -> int:
        return program_of(start + k_units - 1, units, programs) - program_of(start, units, programs) + 1

    return max(of(start) for start in range(0, units, k_units))


def program_of(unit: int, units: int, programs: int) -> int:
    """The program that takes `unit`."""
    return ((unit + 1) * programs - 1) // units
