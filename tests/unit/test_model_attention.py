"""How rows are put together for padded attention."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.model.attention.groups import SMALL_PAGES, group_rows


@given(st.lists(st.integers(1, 300), max_size=40))
def test_every_row_is_in_one_group_and_no_group_wastes_more_than_half(pages: list[int]) -> None:
    groups = group_rows(pages)
    assert sorted(row for group in groups for row in group) == list(range(len(pages)))
    for group in groups:
        longest = max(pages[row] for row in group)
        assert longest <= SMALL_PAGES or all(2 * pages[row] > longest for row in group)
        assert list(group) == sorted(group)
    assert len(groups) <= 6  # 300 halves down to 8 in fewer


def test_alike_rows_are_one_group_in_order() -> None:
    assert group_rows([9, 10, 9, 16]) == ((0, 1, 2, 3),)
    assert group_rows([1, 8, 3]) == ((0, 1, 2),)
    assert group_rows([3, 100]) == ((1,), (0,))
    assert group_rows([]) == ()
