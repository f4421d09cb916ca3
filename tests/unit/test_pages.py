"""Pages of one instance: any order of calls leaves every page in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from stagemesh.shared.engine.pages import PageAllocator, pages_for
from stagemesh.shared.errors import Bug

NUM_PAGES = 16


class AllocatorMachine(RuleBasedStateMachine):
    """Beside the allocator, a model that says which page is where."""

    held: Bundle[list[int]] = Bundle("held")
    tickets: Bundle[str] = Bundle("tickets")
    cached: Bundle[list[int]] = Bundle("cached")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.used: set[int] = set()
        self.kept: set[int] = set()
        self.quarantined: dict[str, set[int]] = {}
        self.num_tickets = 0

    @rule(target=held, count=st.integers(0, NUM_PAGES + 4))
    def allocate(self, count: int) -> list[int] | MultipleResults[list[int]]:
        before = self.pages.num_free
        taken = self.pages.allocate(count)
        assert (taken is None) == (count > before)
        if taken is None:
            assert self.pages.num_free == before
            return multiple()
        assert len(taken) == len(set(taken)) == count
        elsewhere = self.used.union(self.kept, *self.quarantined.values())
        assert not elsewhere & set(taken)
        self.used |= set(taken)
        return taken

    @rule(taken=consumes(held))
    def release(self, taken: list[int]) -> None:
        self.pages.release(taken)
        self.used -= set(taken)

    @rule(target=cached, taken=consumes(held))
    def cache(self, taken: list[int]) -> list[int]:
        for page in taken:
            self.pages.cache(page)
        self.used -= set(taken)
        self.kept |= set(taken)
        return taken

    @rule(target=held, kept=consumes(cached))
    def reuse(self, kept: list[int]) -> list[int]:
        for page in kept:
            self.pages.reuse(page)
        self.kept -= set(kept)
        self.used |= set(kept)
        return kept

    @rule(kept=consumes(cached))
    def evict(self, kept: list[int]) -> None:
        for page in kept:
            self.pages.evict(page)
        self.kept -= set(kept)

    @rule(target=tickets, taken=consumes(held))
    def quarantine(self, taken: list[int]) -> str:
        self.num_tickets += 1
        ticket = f"t{self.num_tickets}"
        self.pages.quarantine(ticket, taken)
        self.used -= set(taken)
        self.quarantined[ticket] = set(taken)
        return ticket

    @rule(ticket=tickets)
    def prove(self, ticket: str) -> None:
        """Also again, and late: it does no harm."""
        self.pages.prove_quiescent(ticket)
        self.quarantined.pop(ticket, None)

    @rule(page=st.integers(-1, NUM_PAGES))
    def give_back_what_is_not_in_use(self, page: int) -> None:
        if page not in self.used:
            with pytest.raises(Bug, match=f"page {page} is given back"):
                self.pages.release([page])

    @rule(ticket=tickets, taken=held)
    def quarantine_twice(self, ticket: str, taken: list[int]) -> None:
        if ticket in self.quarantined:
            with pytest.raises(Bug, match=ticket):
                self.pages.quarantine(ticket, [])

    @invariant()
    def every_page_is_where_the_model_says(self) -> None:
        self.pages.check_integrity()
        assert self.pages.num_used == len(self.used)
        assert self.pages.num_quarantined == sum(map(len, self.quarantined.values()))
        assert self.pages.num_cached == len(self.kept)
        held = self.pages.num_used + self.pages.num_cached + self.pages.num_quarantined
        assert self.pages.num_free + held == NUM_PAGES


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=50, deadline=None)


def test_low_pages_come_first() -> None:
    pages = PageAllocator(8)
    assert (pages.allocate(3), pages.allocate(2)) == ([0, 1, 2], [3, 4])


def test_a_page_given_back_twice_is_an_error_that_changes_nothing_else() -> None:
    pages = PageAllocator(4)
    taken = pages.allocate(2)
    assert taken is not None
    pages.release(taken)
    with pytest.raises(Bug, match="page 0"):
        pages.release(taken)
    pages.check_integrity()
    assert pages.num_free == 4


def test_pages_that_are_not_in_use_cannot_be_quarantined() -> None:
    pages = PageAllocator(4)
    with pytest.raises(Bug, match="t1"):
        pages.quarantine("t1", [0])
    assert pages.num_quarantined == 0


def test_a_page_that_is_in_two_places_is_found() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(2) == [0, 1]
    pages._free.append(0)
    with pytest.raises(Bug, match="do not add up"):
        pages.check_integrity()


def test_an_allocator_has_a_page_at_least() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)


@given(st.integers(0, 10_000), st.integers(1, 256))
def test_pages_for_is_the_least_that_holds_the_tokens(num_tokens: int, page_size: int) -> None:
    count = pages_for(num_tokens, page_size)
    assert (count - 1) * page_size < num_tokens <= count * page_size or (num_tokens, count) == (0, 0)
