"""Pages of one instance: who holds what, as counters that must always add up.

free --allocate--> used --release--> free
used --cache--> cached --reuse--> used                 nobody holds it, but its KV is worth keeping
                cached --evict--> free
used --quarantine--> quarantined --prove--> free       a remote writer may still write there
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from stagemesh.shared.errors import Bug


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out page ids in [0, num_pages). An id means the same page on every stage of the instance."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # taken from the end: low ids first
        self._used: set[int] = set()
        self._cached: set[int] = set()
        self._quarantined: dict[str, tuple[int, ...]] = {}
        self._quarantined_s: dict[str, float] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return sum(len(pages) for pages in self._quarantined.values())

    @property
    def quarantined_since(self) -> Mapping[str, float]:
        """Tickets with pages in quarantine, and since when."""
        return self._quarantined_s

    def allocate(self, count: int) -> list[int] | None:
        """`count` page ids, or None (and nothing taken) if they do not fit now."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._used.update(taken)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Makes used pages free. Raises Bug for a page that is not in use: a double free is never ignored."""
        for page in pages:
            if page not in self._used:
                raise Bug(f"page {page} is given back, but it is not in use")
            self._used.remove(page)
            self._free.append(page)

    def cache(self, page: int) -> None:
        """A used page that nobody holds any more keeps its KV, until it is reused or evicted."""
        if page not in self._used:
            raise Bug(f"page {page} is cached, but it is not in use")
        self._used.remove(page)
        self._cached.add(page)

    def reuse(self, page: int) -> None:
        """A cached page is held again, with the KV that it has."""
        if page not in self._cached:
            raise Bug(f"page {page} is reused, but it is not cached")
        self._cached.remove(page)
        self._used.add(page)

    def evict(self, page: int) -> None:
        """Makes a cached page free: its KV is forgotten."""
        if page not in self._cached:
            raise Bug(f"page {page} is evicted, but it is not cached")
        self._cached.remove(page)
        self._free.append(page)

    def quarantine(self, ticket_id: str, pages: Sequence[int]) -> None:
        """Sets used pages aside that the writers of `ticket_id` may still write to."""
        if ticket_id in self._quarantined or not self._used.issuperset(pages):
            raise Bug(f"ticket {ticket_id}: its pages cannot be quarantined")
        self._used.difference_update(pages)
        self._quarantined[ticket_id] = tuple(pages)
        self._quarantined_s[ticket_id] = time.monotonic()

    def prove_quiescent(self, ticket_id: str) -> None:
        """Nothing writes for `ticket_id` any more: its quarantined pages are free. A late proof does no harm."""
        self._free.extend(self._quarantined.pop(ticket_id, ()))
        self._quarantined_s.pop(ticket_id, None)

    def check_integrity(self) -> None:
        """Raises Bug unless every page is in exactly one place."""
        different = self._used.union(self._free, self._cached, *self._quarantined.values())
        counted = self.num_free + self.num_used + self.num_cached + self.num_quarantined
        within = min(different) >= 0 and max(different) < self.num_pages
        if not len(different) == counted == self.num_pages or not within:
            raise Bug(f"pages do not add up: {self!r}")

    def __repr__(self) -> str:
        return (
            f"<PageAllocator {self.num_free} free + {self.num_used} used + {self.num_cached} cached + "
            f"{self.num_quarantined} quarantined of {self.num_pages}>"
        )
