"""The pages of the prompts that have started: some found in the prefix tree, the others taken for them alone.

take --a chunk is issued--> grown: its full pages are in the tree --give back--> those stay there, the others are free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator, pages_for
from stagemesh.shared.engine.prefix import PrefixNode, PrefixTree, page_keys
from stagemesh.shared.engine.schedule.prefill_state import PrefillSequence
from stagemesh.shared.errors import Bug


class PromptPages:
    """Without `prefix_cache` the tree stays empty, and every prompt is computed whole."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator)
        self._page_size, self._prefix_cache = page_size, prefix_cache

    @property
    def num_available(self) -> int:
        """Free pages, and those that are free for the asking."""
        return self.allocator.num_free + self.allocator.num_cached

    def look_up(self, sequence: PrefillSequence) -> None:
        """Notes what it would find if it started now."""
        sequence.expected_cached = len(self._match(sequence, self._keys(sequence))) * self._page_size

    def take(self, sequence: PrefillSequence) -> bool:
        """All pages of its prompt; False, and nothing taken, if they do not fit now."""
        keys = self._keys(sequence)
        path = self._match(sequence, keys)
        self.tree.hold(path)  # so that it is not evicted to make room for the rest
        pages = self.tree.allocate(pages_for(len(sequence.tokens), self._page_size) - len(path))
        if pages is None:
            self.tree.release(path)
            return False
        sequence.keys, sequence.path, sequence.pages = keys, path, [node.page for node in path] + pages
        sequence.issued = sequence.cached = len(path) * self._page_size
        return True

    def grow(self, sequence: PrefillSequence) -> None:
        """The step being made computes it up to `issued`: full pages up to there serve every prompt that follows."""
        for index in range(len(sequence.path), min(sequence.issued // self._page_size, len(sequence.keys))):
            node = self.tree.insert(sequence.path, sequence.keys[index], sequence.pages[index])
            sequence.path.append(node)

    def give_back(self, sequence: PrefillSequence, issuer: Issuer) -> None:
        """No step of it is out, and no stage sends anything of it."""
        issuer.drop(sequence.handle, sequence.private_pages)
        self.tree.release(sequence.path)

    def _keys(self, sequence: PrefillSequence) -> list[bytes]:
        if not self._prefix_cache or sequence.tells_prompt:
            return []
        return page_keys(sequence.tokens, self._page_size)

    def _match(self, sequence: PrefillSequence, keys: list[bytes]) -> list[PrefixNode]:
        """A prompt's last token is computed in any case, for the sake of its logits."""
        return self.tree.match(keys[: (len(sequence.tokens) - 1) // self._page_size])

    def check_integrity(self, started: Iterable[PrefillSequence], num_freeing: int) -> None:
        """Raises Bug if pages and the sequences that have some do not agree."""
        self.allocator.check_integrity()
        self.tree.check_integrity()
        holders = list(started)
        users = Counter(node for sequence in holders for node in sequence.path)
        if len(users) != self.tree.num_held or any(node.users != count for node, count in users.items()):
            raise Bug(f"{self.tree.num_held} pages of the prefix tree are held, {len(users)} by sequences")
        owned = sum(len(sequence.private_pages) for sequence in holders) + len(users) + num_freeing
        if owned != self.allocator.num_used:
            raise Bug(f"{self.allocator.num_used} pages are in use, but sequences own {owned}")
