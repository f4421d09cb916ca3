"""Numbers of commands and steps, and pages that come back only with the last acknowledgement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stagemesh.shared.core.commands import EMPTY, Command, Join, pack_deltas, unpack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.errors import Bug

NUM_PAGES = 12
ROWS = np.zeros((1, 6), dtype=np.int64)


def join_of(handle: int) -> Join:
    return Join(handle, RequestRef(f"r{handle}", 0), SamplingParams(max_tokens=1))


class IssuerMachine(RuleBasedStateMachine):
    """Sequences join and are dropped; commands are acknowledged in order, by their steps' results or alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.issuer = Issuer(self.pages)
        self.heard: dict[int, list[int]] = {}  # handle -> pages, of those that the stages have heard of
        self.unheard: dict[int, list[int]] = {}
        self.grown: dict[int, list[int]] = {}  # handle -> pages that the stages have not heard of
        self.dropping: dict[int, list[int]] = {}  # dropped since the last command
        self.cancels: list[int] = []
        self.retracts: list[int] = []
        self.resumes: list[int] = []
        self.freeing: dict[int, list[int]] = {}  # command number -> pages
        self.numbers: list[int] = []
        self.steps: dict[int, int] = {}  # step number -> command number
        self.acknowledged = 0

    @rule(count=st.integers(1, 4))
    def join(self, count: int) -> None:
        pages = self.pages.allocate(count)
        if pages is None:
            return
        handle = self.issuer.new_handle()
        assert handle not in {**self.heard, **self.unheard, **self.dropping}
        self.issuer.join(join_of(handle))
        self.issuer.add_pages(handle, pages)
        self.unheard[handle] = pages

    @precondition(lambda self: self.heard)
    @rule(pick=st.integers(0, 100))
    def grow(self, pick: int) -> None:
        handle = sorted(self.heard)[pick % len(self.heard)]
        pages = self.pages.allocate(1)
        if pages is not None:
            self.issuer.add_pages(handle, pages)
            self.heard[handle] = self.heard[handle] + pages
            self.grown[handle] = self.grown.get(handle, []) + pages

    @precondition(lambda self: self.heard)
    @rule(pick=st.integers(0, 100))
    def drop(self, pick: int) -> None:
        handle = sorted(self.heard)[pick % len(self.heard)]
        if handle in self.retracts + self.resumes:
            return
        self.dropping[handle] = self.heard.pop(handle)
        self.grown.pop(handle, None)
        self.issuer.drop(handle, self.dropping[handle])

    @precondition(lambda self: self.unheard)
    @rule(pick=st.integers(0, 100))
    def drop_before_any_stage_has_heard_of_it(self, pick: int) -> None:
        handle = sorted(self.unheard)[pick % len(self.unheard)]
        pages, before = self.unheard.pop(handle), self.pages.num_free
        self.issuer.drop(handle, pages)
        assert self.pages.num_free == before + len(pages)

    @precondition(lambda self: self.heard)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        handle = sorted(self.heard)[pick % len(self.heard)]
        self.issuer.cancel(handle)
        self.cancels.append(handle)

    @precondition(lambda self: self.heard)
    @rule(pick=st.integers(0, 100))
    def retract(self, pick: int) -> None:
        """Not one whose new pages travel with the same command."""
        handle = sorted(self.heard)[pick % len(self.heard)]
        if handle in self.grown:
            with pytest.raises(Bug, match=f"sequence {handle} is retracted"):
                self.issuer.retract(handle)
        elif handle not in self.retracts + self.resumes:
            self.issuer.retract(handle)
            self.retracts.append(handle)

    @precondition(lambda self: self.heard)
    @rule(pick=st.integers(0, 100))
    def resume(self, pick: int) -> None:
        handle, pages = sorted(self.heard)[pick % len(self.heard)], self.pages.allocate(1)
        if pages is None:
            return
        if handle in self.retracts + self.resumes:
            self.pages.release(pages)
            return
        self.issuer.resume(handle, pages)
        self.heard[handle] = self.heard[handle] + pages
        self.grown[handle] = self.grown.get(handle, []) + pages
        self.resumes.append(handle)

    @rule(with_step=st.booleans())
    def issue(self, with_step: bool) -> None:
        if with_step:
            command = self.issuer.issue_step(0, ROWS, EMPTY)
            assert command.step is not None
            assert self.issuer.outstanding[command.step.number] is command.step
            assert command.step.number == self.issuer.steps_issued == len(self.steps) + 1
            self.steps[command.step.number] = command.number
            self.check(command)
        elif (flushed := self.issuer.flush()) is not None:
            assert flushed.step is None
            self.check(flushed)
        else:
            assert (self.unheard, self.dropping, self.cancels) == ({}, {}, [])
            assert (self.retracts, self.resumes) == ([], [])

    def check(self, command: Command) -> None:
        """It carries what was collected, once, and is the next number."""
        assert command.number == len(self.numbers) + 1
        self.numbers.append(command.number)
        assert {join.handle for join in command.joins} == set(self.unheard)
        assert set(command.drops) == set(self.dropping)
        assert list(command.cancels) == self.cancels
        assert (list(command.retracts), list(command.resumes)) == (self.retracts, self.resumes)
        deltas = dict(unpack_deltas(command.page_deltas))
        assert deltas.keys() >= self.unheard.keys()
        for handle, pages in self.unheard.items():
            assert deltas[handle] == pages
        assert not deltas.keys() & set(command.drops)  # a stage drops before it takes pages: it would not know them
        self.heard |= self.unheard
        self.freeing[command.number] = [page for pages in self.dropping.values() for page in pages]
        for handle in command.resumes:
            assert deltas[handle] == self.grown[handle]
        self.unheard, self.dropping, self.cancels, self.grown = {}, {}, [], {}
        self.retracts, self.resumes = [], []

    @precondition(lambda self: self.acknowledged < len(self.numbers))
    @rule(pick=st.integers(0, 100))
    def acknowledge(self, pick: int) -> None:
        first, last = self.acknowledged + 1, len(self.numbers)
        number = first + pick % (last - first + 1)
        self.issuer.applied(number)
        self.acknowledge_up_to(number)

    @precondition(lambda self: self.issuer.outstanding)
    @rule(pick=st.integers(0, 100))
    def result(self, pick: int) -> None:
        number = min(self.issuer.outstanding)
        step = self.issuer.take_result(number)
        assert step.number == number
        self.acknowledge_up_to(self.steps[number])
        with pytest.raises(Bug, match=f"step {number}"):
            self.issuer.take_result(number)

    def acknowledge_up_to(self, number: int) -> None:
        self.acknowledged = max(self.acknowledged, number)
        self.freeing = {command: pages for command, pages in self.freeing.items() if command > number}

    @rule()
    def acknowledge_what_was_never_issued(self) -> None:
        for number in (len(self.numbers) + 1, -1):
            with pytest.raises(Bug, match="last issued"):
                self.issuer.applied(number)

    @invariant()
    def pages_are_used_until_the_last_stage_has_applied_the_drop(self) -> None:
        self.pages.check_integrity()
        owned = sum(map(len, [*self.heard.values(), *self.unheard.values()]))
        freeing = sum(map(len, [*self.freeing.values(), *self.dropping.values()]))
        assert self.issuer.num_freeing == freeing
        assert self.pages.num_used == owned + freeing
        assert self.issuer.unacknowledged == len(self.numbers) - self.acknowledged


TestIssuer = IssuerMachine.TestCase
TestIssuer.settings = settings(max_examples=60, deadline=None)


def test_a_dropped_join_leaves_no_trace() -> None:
    pages = PageAllocator(4)
    issuer = Issuer(pages)
    handle, taken = issuer.new_handle(), pages.allocate(2)
    assert taken is not None
    issuer.join(join_of(handle))
    issuer.add_pages(handle, taken)
    issuer.drop(handle, taken)
    assert issuer.flush() is None
    assert pages.num_free == 4


def test_pages_of_a_dropped_sequence_wait_for_the_command_that_drops_it() -> None:
    pages = PageAllocator(4)
    issuer = Issuer(pages)
    handle, taken = issuer.new_handle(), pages.allocate(2)
    assert taken is not None
    issuer.join(join_of(handle))
    joined = issuer.flush()
    assert joined is not None
    issuer.drop(handle, taken)
    issuer.applied(joined.number)
    assert pages.num_free == 2
    dropped = issuer.issue_step(0, ROWS, EMPTY)
    assert (dropped.drops, pages.num_free) == ((handle,), 2)
    assert dropped.step is not None
    issuer.take_result(dropped.step.number)
    assert (pages.num_free, issuer.num_freeing, issuer.unacknowledged) == (4, 0, 0)


@pytest.mark.parametrize("deltas", [{}, {3: [1, 2], 4: []}, {1: [0]}], ids=str)
def test_page_deltas_survive_packing(deltas: dict[int, list[int]]) -> None:
    assert dict(unpack_deltas(pack_deltas(deltas))) == deltas


@pytest.mark.parametrize("flat", [[1], [1, 2, 3], [1, -1], [1, 1, 5, 2]], ids=str)
def test_page_deltas_that_are_cut_short_are_refused(flat: list[int]) -> None:
    with pytest.raises(ValueError, match="cut short"):
        unpack_deltas(np.array(flat, dtype=np.int64))


def test_one_that_joins_with_the_next_command_is_not_retracted_by_it() -> None:
    pages = PageAllocator(4)
    issuer = Issuer(pages)
    handle, taken = issuer.new_handle(), pages.allocate(2)
    assert taken is not None
    issuer.join(join_of(handle))
    issuer.add_pages(handle, taken)
    assert issuer.is_joining(handle)
    with pytest.raises(Bug, match="have not heard of all its pages"):
        issuer.retract(handle)
    issuer.flush()
    assert not issuer.is_joining(handle)
    issuer.retract(handle)
    retracted = issuer.flush()
    assert retracted is not None
    assert retracted.retracts == (handle,)
