"""What prefill instances have probably cached: the beginnings of the prompts that this router has sent them.

A page of a prompt is known by a hash of all tokens up to its end. Only placement relies on it: where it is wrong (an
instance has evicted what it had, another router has sent more) a request is placed less well, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef

MAX_PAGES: Final = 1 << 16  # known of one instance: some 10 MB


def page_hashes(token_ids: Sequence[int], page_size: int) -> list[int]:
    """One for each full page: of its tokens and of all before it."""
    ids = np.array(token_ids, dtype=np.int64).tobytes()
    width, hashes, before = page_size * 8, [], 0
    for at in range(0, len(ids) - width + 1, width):
        before = hash((before, ids[at : at + width]))
        hashes.append(before)
    return hashes


class _Known:
    """Of one life of an instance; the least recently sent first, later pages of a prompt before earlier ones."""

    def __init__(self, ref: InstanceRef, capacity: int) -> None:
        self.ref, self._capacity = ref, capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def count(self, hashes: Sequence[int]) -> int:
        """How many pages from the first on are known."""
        return next((at for at, page in enumerate(hashes) if page not in self._hashes), len(hashes))

    def note(self, hashes: Sequence[int]) -> None:
        for page in reversed(hashes):
            self._hashes[page] = None
            self._hashes.move_to_end(page)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)


class PrefixIndex:
    """By instance. It knows no more pages of one than that has, at most `max_pages`; a new epoch begins with none."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._known: dict[str, _Known] = {}

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._known.values()))

    def cached_tokens(self, info: InstanceInfo, token_ids: Sequence[int]) -> int:
        """Tokens of the prompt that `info` need not compute; the last one it always does."""
        known = self._known.get(info.ref.name)
        if known is None or known.ref != info.ref:
            return 0
        page_size = info.manifest.page_size
        hashes = page_hashes(token_ids, page_size)
        return known.count(hashes[: (len(token_ids) - 1) // page_size]) * page_size

    def note(self, info: InstanceInfo, token_ids: Sequence[int]) -> None:
        """The prompt goes to `info`, and what it computes stays there."""
        known = self._known.get(info.ref.name)
        if known is None or known.ref != info.ref:
            capacity = min(info.manifest.num_pages, self._max_pages)
            known = self._known[info.ref.name] = _Known(info.ref, capacity)
        known.note(page_hashes(token_ids, info.manifest.page_size))

    def forget(self, ref: InstanceRef) -> None:
        """That life of the instance is over."""
        known = self._known.get(ref.name)
        if known is not None and known.ref == ref:
            del self._known[ref.name]
