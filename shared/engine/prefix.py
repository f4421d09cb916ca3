"""The KV of prompts that an instance keeps: a radix tree whose digits are full pages of token ids.

a prompt computes a page --insert--> held --its last holder releases it--> idle --hold--> held
                                                                            `--evict, least recently used--> gone

A path from the root spells the first pages of a prompt. Who holds a page holds all before it, and a release goes from
the end of a path to its beginning, so that the first of the idle pages is always a leaf: to evict is to take it.

A page enters the tree when the step that computes it has been issued, not when its result is back: stages apply
commands in order, so whatever step may read it is run after the one that writes it, and within a step every row's KV is
written before any row attends. Whoever computes, reads or sends a page holds it until its steps are back and its KV has
been sent. So an idle page is named by no step in flight and read by no sender: it may be given to another prompt at
once, whose join comes after the drops of all that held it before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from stagemesh.shared.core.commands import Ints
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.errors import Bug


def page_keys(tokens: Ints, page_size: int) -> list[bytes]:
    """The token ids of each full page of a prompt, as the tree compares them."""
    width = page_size * np.dtype(np.int64).itemsize
    flat = tokens.astype(np.int64, copy=False).tobytes()
    return [flat[at : at + width] for at in range(0, len(flat) - width + 1, width)]


class PrefixNode:
    """A page of KV after all pages before it on the path. `users` hold it; the tree alone changes it."""

    __slots__ = ("children", "key", "page", "siblings", "users")

    def __init__(self, key: bytes, page: int, siblings: dict[bytes, PrefixNode]) -> None:
        self.key, self.page, self.siblings = key, page, siblings
        self.children: dict[bytes, PrefixNode] = {}
        self.users = 1


class PrefixTree:
    """Pages with users are `used` in the allocator, those without are `cached`. Its paths begin at the root."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._root: dict[bytes, PrefixNode] = {}
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()  # least recently used first, children before parents
        self._size = self.evicted = 0

    @property
    def num_held(self) -> int:
        """Pages of the tree that somebody holds."""
        return self._size - len(self._idle)

    def match(self, keys: Sequence[bytes]) -> list[PrefixNode]:
        """The longest path that spells a beginning of `keys`. Nobody holds it yet."""
        path, level = [], self._root
        for key in keys:
            if (node := level.get(key)) is None:
                break
            path.append(node)
            level = node.children
        return path

    def hold(self, path: Sequence[PrefixNode]) -> None:
        """One more user for each page of `path`, a whole path from the root."""
        for node in path:
            self._hold(node)

    def insert(self, path: Sequence[PrefixNode], key: bytes, page: int) -> PrefixNode:
        """The page after `path`, which the caller holds, and which it holds too from now on. `page` has its KV, or will
        by the time that a step issued later reads it. If another prompt was first, its node, with another page."""
        siblings = path[-1].children if path else self._root
        if (node := siblings.get(key)) is not None:
            self._hold(node)
            return node
        node = siblings[key] = PrefixNode(key, page, siblings)
        self._size += 1
        return node

    def release(self, path: Sequence[PrefixNode]) -> None:
        """One user less for each page of `path`, a whole path from the root. Pages without users stay until evicted."""
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self._pages.cache(node.page)
                self._idle[node] = None

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, idle ones evicted as far as need be; or None, and nothing evicted, if they do not fit now."""
        missing = max(0, count - self._pages.num_free)
        if missing > len(self._idle):
            return None
        self._evict(missing)
        return self._pages.allocate(count)

    def flush(self) -> int:
        """Evicts all that nobody holds. Returns how many pages that were."""
        count = len(self._idle)
        self._evict(count)
        return count

    def _hold(self, node: PrefixNode) -> None:
        if not node.users:
            self._pages.reuse(node.page)
            del self._idle[node]
        node.users += 1

    def _evict(self, count: int) -> None:
        for _ in range(count):
            node, _ = self._idle.popitem(last=False)
            del node.siblings[node.key]
            self._pages.evict(node.page)
        self._size -= count
        self.evicted += count

    def _nodes(self) -> Iterator[PrefixNode]:
        stack = list(self._root.values())
        while stack:
            yield (node := stack.pop())
            stack += node.children.values()

    def check_integrity(self) -> None:
        """Raises Bug unless no page is in the tree twice, idle pages are the cached ones, in an order in which each is
        a leaf when its turn comes, and whoever holds a page holds those before it."""
        nodes = list(self._nodes())
        if len(nodes) != self._size or len({node.page for node in nodes}) != self._size:
            raise Bug(f"the prefix tree has {len(nodes)} nodes, it counts {self._size}")
        turn = {node: index for index, node in enumerate(self._idle)}
        if {node for node in nodes if not node.users} != turn.keys() or len(turn) != self._pages.num_cached:
            raise Bug(f"{len(turn)} pages of the prefix tree are idle, {self._pages.num_cached} are cached")
        for node in nodes:
            users, last = 0, -1  # of those after it, which are few: no generators
            for child in node.children.values():
                users += child.users
                last = max(last, turn.get(child, -1))
            if users > node.users:
                raise Bug(f"page {node.page} has {node.users} users, fewer than those after it")
            if not node.users and last > turn[node]:
                raise Bug(f"page {node.page} would be evicted before one after it")
