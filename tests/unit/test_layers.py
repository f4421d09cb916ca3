"""Cutting a model into stages, and who sends what to whom when two cuts differ."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.layers import LayerRange, Leg, plan_legs, split_layers
from stagemesh.shared.errors import Rejected


@st.composite
def sizes_of(draw: st.DrawFn, num_layers: int) -> list[int]:
    cuts = draw(st.sets(st.integers(1, num_layers - 1))) if num_layers > 1 else set()
    return [hi - lo for lo, hi in pairwise([0, *sorted(cuts), num_layers])]


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    num_layers = draw(st.integers(1, 24))
    return num_layers, draw(sizes_of(num_layers)), draw(sizes_of(num_layers))


def layers_of(ranges: tuple[LayerRange, ...]) -> list[int]:
    return [layer for part in ranges for layer in range(part.lo, part.hi)]


@given(num_layers=st.integers(1, 200), data=st.data())
def test_an_even_split_covers_all_layers_in_order_with_the_leftover_first(num_layers: int, data: st.DataObject) -> None:
    pp_size = data.draw(st.integers(1, num_layers))
    parts = split_layers(num_layers, pp_size)
    assert len(parts) == pp_size
    assert layers_of(parts) == list(range(num_layers))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(two_cuts())
def test_a_split_by_sizes_has_those_sizes(cuts: tuple[int, list[int], list[int]]) -> None:
    num_layers, sizes, _ = cuts
    parts = split_layers(num_layers, len(sizes), sizes)
    assert [len(part) for part in parts] == sizes
    assert layers_of(parts) == list(range(num_layers))
    assert split_layers(num_layers, len(sizes), []) == split_layers(num_layers, len(sizes))


@given(two_cuts())
def test_each_layer_is_in_exactly_one_leg_whatever_the_two_splits(cuts: tuple[int, list[int], list[int]]) -> None:
    num_layers, ours, theirs = cuts
    writers = split_layers(num_layers, len(ours), ours)
    targets = split_layers(num_layers, len(theirs), theirs)
    legs = plan_legs(writers, targets)
    assert sorted(layers_of(tuple(leg.layers for leg in legs))) == list(range(num_layers))
    for leg in legs:
        assert leg.layers.intersect(writers[leg.writer]) == leg.layers
        assert leg.layers.intersect(targets[leg.target]) == leg.layers
    assert len({(leg.writer, leg.target) for leg in legs}) == len(legs)
    assert len(legs) <= len(writers) + len(targets) - 1  # so a page's layers of a leg are one piece


def test_uneven_splits_meet_as_the_picture_says() -> None:
    legs = plan_legs(split_layers(30, 3, [8, 16, 6]), split_layers(30, 2, [16, 14]))
    assert legs == (
        Leg(0, 0, LayerRange(0, 8)),
        Leg(1, 0, LayerRange(8, 16)),
        Leg(1, 1, LayerRange(16, 24)),
        Leg(2, 1, LayerRange(24, 30)),
    )


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_an_intersection_is_what_both_have(lo: int, length: int, other_lo: int, other_length: int) -> None:
    one, other = LayerRange(lo, lo + length), LayerRange(other_lo, other_lo + other_length)
    common = set(range(one.lo, one.hi)) & set(range(other.lo, other.hi))
    found = one.intersect(other)
    assert found == other.intersect(one)
    assert (set() if found is None else set(range(found.lo, found.hi))) == common
    assert found is None or len(found) > 0


@pytest.mark.parametrize("pp_size", [0, -1, 31])
def test_a_stage_without_a_layer_is_rejected_by_name(pp_size: int) -> None:
    with pytest.raises(Rejected, match=rf"^pp_size: .*1\.\.30.*got {pp_size}$") as caught:
        split_layers(30, pp_size)
    assert caught.value.field == "pp_size"


@pytest.mark.parametrize("sizes", [[12, 17], [12, 19], [30], [10, 10, 10], [30, 0], [31, -1]], ids=str)
def test_sizes_that_do_not_add_up_are_rejected_by_name(sizes: list[int]) -> None:
    with pytest.raises(Rejected, match=r"^layers: needs 2 sizes .* 30 layers, got ") as caught:
        split_layers(30, 2, sizes)
    assert caught.value.field == "layers"


@given(st.integers(1, 64), st.integers(1, 16))
def test_without_a_head_the_split_is_even_with_leftovers_first(num_layers: int, pp_size: int) -> None:
    if pp_size > num_layers:
        return
    sizes = [len(layers) for layers in split_layers(num_layers, pp_size)]
    base, leftover = divmod(num_layers, pp_size)
    assert sizes == [base + (rank < leftover) for rank in range(pp_size)]


@given(st.integers(2, 64), st.integers(2, 8), st.floats(0, 30))
def test_the_slowest_stage_is_as_quick_as_can_be(num_layers: int, pp_size: int, head: float) -> None:
    if pp_size > num_layers:
        return
    *others, last = [len(layers) for layers in split_layers(num_layers, pp_size, head_layers=head)]
    slowest = max(*others, last + head)
    for other_last in range(1, num_layers - pp_size + 2):
        assert slowest <= max(-(-(num_layers - other_last) // (pp_size - 1)), other_last + head)


def test_a_large_head_takes_layers_off_the_last_stage() -> None:
    assert [len(layers) for layers in split_layers(30, 2, head_layers=6.4)] == [18, 12]
