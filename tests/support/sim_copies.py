"""Host memory of a simulated stage: copies of retracted sequences that take their time, and finish in any order."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple, TypeVar

V = TypeVar("V")


class SimCopy(NamedTuple):
    """A copy under way: of all `pages`, which nobody else may touch until it is done."""

    handle: int
    pages: tuple[int, ...]
    restored: bool


class SimHost:
    """Of one stage. Bytes are moved when a copy ends, not when it begins: whoever touches its pages too early is found
    out."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.under_way: list[SimCopy] = []
        self.copies: dict[int, list[object]] = {}  # handle -> what its slots hold

    def retract(self, handle: int, pages: list[int]) -> None:
        assert handle not in self.copies
        assert pages
        self.under_way.append(SimCopy(handle, tuple(pages), restored=False))

    def resume(self, handle: int, pages: list[int]) -> None:
        assert len(self.copies[handle]) == len(pages) * self._page_size
        self.under_way.append(SimCopy(handle, tuple(pages), restored=True))

    def drop(self, handle: int) -> None:
        assert not self.is_copying(handle)
        self.copies.pop(handle, None)

    def is_copying(self, handle: int) -> bool:
        return any(copy.handle == handle for copy in self.under_way)

    def finish(self, pick: int, pool: MutableMapping[int, V]) -> SimCopy:
        """One of the copies that are under way is done."""
        copy = self.under_way.pop(pick % len(self.under_way))
        slots = [page * self._page_size + offset for page in copy.pages for offset in range(self._page_size)]
        if not copy.restored:
            self.copies[copy.handle] = [pool.get(slot) for slot in slots]
            return copy
        for slot, value in zip(slots, self.copies.pop(copy.handle), strict=True):
            pool.pop(slot, None)
            if value is not None:
                pool[slot] = value  # type: ignore[assignment]
        return copy
