"""How weights are cut for decode, and which program takes what."""

from __future__ import annotations

import pytest
import torch

from stagemesh.shared.model.cuda.packing import PROCESSORS, Cut, cut_for, fold_norm, most_pieces, pack, program_of

PARTITIONS = [(1, 1, 1), (1, 9, 9), (3, 7, 4), (32, 32, 128), (48, 32, 96), (112, 64, 112), (224, 32, 132), (5, 9, 44)]
"""(tiles, units of a tile, programs)"""


@pytest.mark.parametrize(("tiles", "k_units", "programs"), PARTITIONS)
def test_each_unit_has_the_program_whose_range_holds_it(tiles: int, k_units: int, programs: int) -> None:
    units = tiles * k_units
    takers = []
    for program in range(programs):
        begin, end = program * units // programs, (program + 1) * units // programs
        assert end > begin
        takers += [program] * (end - begin)
    assert [program_of(unit, units, programs) for unit in range(units)] == takers
    each = [len(set(takers[tile * k_units : (tile + 1) * k_units])) for tile in range(tiles)]
    assert most_pieces(tiles, k_units, programs) == max(each)


@pytest.mark.parametrize(("tiles", "k_units", "programs"), PARTITIONS)
def test_a_program_has_one_piece_that_begins_a_tile_and_one_that_ends_one(
    tiles: int, k_units: int, programs: int
) -> None:
    """So that two places in the workspace are enough for it."""
    units = tiles * k_units
    for program in range(programs):
        begin, end = program * units // programs, (program + 1) * units // programs
        kinds = []
        for tile in range(begin // k_units, (end - 1) // k_units + 1):
            first, last = max(begin, tile * k_units), min(end, (tile + 1) * k_units)
            if last - first < k_units:
                kinds.append(first == tile * k_units)
        assert len(kinds) == len(set(kinds))


def test_units_are_tiles_in_the_order_of_reading() -> None:
    weight = torch.arange(6 * 8).view(6, 8)
    packed = pack(weight, cut=Cut(width=2, depth=4, programs=1))
    assert packed.columns == 6
    units = packed.units.view(3, 2, 2, 4)  # tile, unit of it, column, depth
    for tile in range(3):
        for unit in range(2):
            assert torch.equal(units[tile, unit], weight[2 * tile : 2 * tile + 2, 4 * unit : 4 * unit + 4])


def test_a_tile_of_a_pair_has_gate_above_up() -> None:
    weight = torch.arange(8 * 4).view(8, 4)
    packed = pack(weight, paired=True, cut=Cut(width=4, depth=4, programs=1))
    assert packed.columns == 4
    assert torch.equal(packed.units, weight[[0, 1, 4, 5, 2, 3, 6, 7]])


@pytest.mark.parametrize("paired", [False, True])
def test_what_does_not_fill_a_unit_is_filled_up_with_zeros(paired: bool) -> None:
    weight = torch.arange(1, 1 + 10 * 5).view(10, 5)
    packed = pack(weight, paired=paired, cut=Cut(width=4, depth=4, programs=1))
    assert packed.columns == (5 if paired else 10)
    assert packed.units.sum() == weight.sum()
    assert packed.units.shape == (3 * 2 * 4, 4)


@pytest.mark.parametrize("rows", [16, 128, 4096, 6144, 9 * 1024, 28672, 32768, 128256])
def test_cuts_keep_every_processor_busy_and_pieces_few(rows: int) -> None:
    cut = cut_for(rows)
    tiles, k_units = -(-rows // cut.width), -(-4096 // cut.depth)
    assert cut.programs <= PROCESSORS
    assert most_pieces(tiles, k_units, min(cut.programs, tiles * k_units)) <= 8
    if rows >= 4096:
        assert cut.programs > PROCESSORS / 2


def test_a_folded_norm_scales_the_columns() -> None:
    weight, norm = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([1.0, 2.0, 0.5])
    assert fold_norm(weight, norm).tolist() == [[1.0, 2.0, 0.5]] * 2
    assert fold_norm(weight, norm).dtype == torch.bfloat16
