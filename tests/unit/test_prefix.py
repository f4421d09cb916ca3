"""The prefix tree: shares what is there, keeps what nobody holds, evicts the least recently used leaf."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.prefix import PrefixNode, PrefixTree, page_keys
from stagemesh.shared.errors import Bug

NUM_PAGES = 10
PROMPTS = st.text("ab", min_size=1, max_size=6)  # a letter is a page


@dataclass(slots=True)
class Known:
    """What the model knows of a page of the tree. `released` is when its last user let go of it."""

    page: int
    users: int
    released: int = 0


@dataclass(slots=True)
class Held:
    """A prompt that has its pages: those of the tree, and its own."""

    text: str
    path: list[PrefixNode]
    private: list[int]


class TreeMachine(RuleBasedStateMachine):
    """Beside the tree, a model that knows every page by the text that leads to it and looks for the oldest leaf."""

    prompts: Bundle[Held] = Bundle("prompts")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.tree = PrefixTree(self.pages)
        self.known: dict[str, Known] = {}
        self.num_private = self.clock = 0

    @rule(target=prompts, text=PROMPTS, computed=st.integers(0, 6))
    def start(self, text: str, computed: int) -> Held | MultipleResults[Held]:
        """Takes pages for all of `text`; enters those that follow the ones found, up to `computed`, into the tree."""
        found = [text[: n + 1] for n in range(len(text)) if text[: n + 1] in self.known]
        path = self.tree.match(keys_of(text))
        assert [node.page for node in path] == [self.known[name].page for name in found]
        self.tree.hold(path)
        for name in found:
            self.known[name].users += 1
        needed = len(text) - len(path)
        fits = self.evict(needed)
        fresh = self.tree.allocate(needed)
        assert (fresh is not None) == fits
        if fresh is None:
            self.let_go(text, path)
            return multiple()
        for at in range(len(path), min(computed, len(text))):
            page = fresh.pop(0)
            node = self.tree.insert(path, keys_of(text)[at], page)
            assert node.page == page
            self.known[text[: at + 1]] = Known(page, users=1)
            path.append(node)
        self.num_private += len(fresh)
        return Held(text, path, fresh)

    @rule(held=prompts)
    def compute_what_is_there(self, held: Held) -> None:
        """Somebody else was first with the next page: its node is shared, the own page stays private."""
        at = len(held.path)
        name = held.text[: at + 1]
        if at < len(held.text) and name in self.known:
            node = self.tree.insert(held.path, keys_of(held.text)[at], held.private[0])
            assert node.page == self.known[name].page != held.private[0]
            self.known[name].users += 1
            held.path.append(node)

    @rule(held=consumes(prompts))
    def end(self, held: Held) -> None:
        self.pages.release(held.private)
        self.num_private -= len(held.private)
        self.let_go(held.text, held.path)

    @rule()
    def flush(self) -> None:
        idle = [name for name, known in self.known.items() if not known.users]
        assert self.tree.flush() == len(idle)
        for name in idle:
            del self.known[name]

    def let_go(self, text: str, path: list[PrefixNode]) -> None:
        self.tree.release(path)
        for at in reversed(range(len(path))):
            self.clock += 1
            known = self.known[text[: at + 1]]
            known.users, known.released = known.users - 1, self.clock

    def evict(self, needed: int) -> bool:
        """Makes room in the model, leaf by leaf, if there is enough that can be evicted."""
        idle = [name for name, known in self.known.items() if not known.users]
        missing = needed - self.pages.num_free
        if missing > len(idle):
            return False
        for _ in range(missing):
            leaves = [n for n in idle if n in self.known and not {n + "a", n + "b"} & self.known.keys()]
            del self.known[min(leaves, key=lambda name: self.known[name].released)]
        return True

    @invariant()
    def tree_and_model_agree(self) -> None:
        self.tree.check_integrity()
        self.pages.check_integrity()
        for name, known in self.known.items():
            path = self.tree.match(keys_of(name))
            assert [len(path), path[-1].page, path[-1].users] == [len(name), known.page, known.users]
        idle = sum(not known.users for known in self.known.values())
        assert self.pages.num_cached == idle
        assert self.tree.num_held == len(self.known) - idle
        assert self.pages.num_used == self.num_private + self.tree.num_held
        assert self.pages.num_free == NUM_PAGES - self.pages.num_used - idle


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def keys_of(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def tree_with(*texts: str, num_pages: int = NUM_PAGES) -> tuple[PrefixTree, PageAllocator, list[list[PrefixNode]]]:
    """A tree in which each of `texts` is held, entered in that order."""
    pages = PageAllocator(num_pages)
    tree, paths = PrefixTree(pages), []
    for text in texts:
        path = tree.match(keys_of(text))
        tree.hold(path)
        for key in keys_of(text)[len(path) :]:
            taken = tree.allocate(1)
            assert taken is not None
            path.append(tree.insert(path, key, taken[0]))
        paths.append(path)
    return tree, pages, paths


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 9))
def test_keys_are_those_of_full_pages_and_tell_all_ids_apart(ids: list[int], page_size: int) -> None:
    keys = page_keys(np.array(ids, dtype=np.int64), page_size)
    assert len(keys) == len(ids) // page_size
    assert np.frombuffer(b"".join(keys), dtype=np.int64).tolist() == ids[: len(keys) * page_size]


def test_keys_of_a_part_of_an_array_are_those_of_its_ids() -> None:
    ids = np.arange(20)
    assert page_keys(ids[::2], 5) == page_keys(np.arange(0, 20, 2), 5)


def test_what_is_held_is_never_evicted() -> None:
    tree, pages, (path, other) = tree_with("abc", "abd")
    tree.release(other)
    assert tree.allocate(NUM_PAGES - 2) is None
    assert tree.allocate(NUM_PAGES - 3) is not None  # all that is free, and `d`
    assert [len(tree.match(keys_of(text))) for text in ("abc", "abd")] == [3, 2]
    assert tree.evicted == 1
    tree.release(path)
    assert (pages.num_cached, tree.num_held) == (3, 0)


def test_of_what_nobody_holds_the_ends_go_before_the_beginnings() -> None:
    tree, _, (path, other) = tree_with("abc", "abd")
    tree.release(path)
    tree.release(other)
    lengths = []
    for _ in range(4):
        tree._evict(1)
        lengths.append([len(tree.match(keys_of(text))) for text in ("abc", "abd")])
    assert lengths == [[2, 3], [2, 2], [1, 1], [0, 0]]


def test_what_was_used_last_stays_longest() -> None:
    tree, _, (first, second) = tree_with("a", "b")
    tree.release(first)
    tree.release(second)
    tree.hold(first)
    tree.release(first)
    tree._evict(1)
    assert [len(tree.match(keys_of(text))) for text in "ab"] == [1, 0]


def test_pages_that_are_not_cached_can_be_neither_reused_nor_evicted() -> None:
    pages = PageAllocator(2)
    assert pages.allocate(1) == [0]
    for call, page, message in (
        (pages.reuse, 0, "reused"),
        (pages.evict, 0, "evicted"),
        (pages.evict, 1, "evicted"),
        (pages.cache, 1, "cached"),
    ):
        with pytest.raises(Bug, match=message):
            call(page)
    pages.cache(0)
    with pytest.raises(Bug, match="given back"):
        pages.release([0])
    pages.check_integrity()
    assert (pages.num_free, pages.num_used, pages.num_cached) == (1, 0, 1)


def spoil_users(tree: PrefixTree, path: list[PrefixNode]) -> None:
    path[0].users = 0


def spoil_order(tree: PrefixTree, path: list[PrefixNode]) -> None:
    tree.release(path)
    tree._idle.move_to_end(path[1])


def spoil_pages(tree: PrefixTree, path: list[PrefixNode]) -> None:
    path[0].page = path[1].page


def spoil_size(tree: PrefixTree, path: list[PrefixNode]) -> None:
    path[0].children.clear()


@pytest.mark.parametrize("spoil", [spoil_users, spoil_order, spoil_pages, spoil_size])
def test_a_tree_that_does_not_add_up_is_found(spoil: object) -> None:
    tree, _, (path,) = tree_with("ab")
    tree.check_integrity()
    assert callable(spoil)
    spoil(tree, path)
    with pytest.raises(Bug):
        tree.check_integrity()
