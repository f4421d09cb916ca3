"""Which rows of a step share one padded attention call. Pure: lengths in, row numbers out."""

from __future__ import annotations

from collections.abc import Sequence

SMALL_PAGES = 8


def group_rows(num_pages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Row numbers in groups, each in ascending order. Rows are padded to the longest of their group, so a group holds
    only rows of more than half its pages; rows of up to `SMALL_PAGES` are all alike, as a call costs more."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(num_pages)), key=lambda row: -num_pages[row]):
        if not groups or (longest > SMALL_PAGES and 2 * num_pages[row] <= longest):
            groups.append([])
            longest = num_pages[row]
        groups[-1].append(row)
    return tuple(tuple(sorted(group)) for group in groups)
