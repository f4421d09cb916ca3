"""Microbatches: always balanced, and turns that go round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagemesh.shared.engine.microbatch import Microbatches
from stagemesh.shared.errors import Bug


class MicrobatchMachine(RuleBasedStateMachine):
    """Sequences come and go between turns."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = Microbatches(1)
        self.count = 1
        self.here: list[int] = []
        self.last_handle = 0
        self.last_turn: int | None = None

    @initialize(count=st.integers(1, 5))
    def build(self, count: int) -> None:
        self.count, self.batches = count, Microbatches(count)

    @rule(count=st.integers(1, 6), kept=st.sets(st.integers(1, 30)))
    def join(self, count: int, kept: set[int]) -> None:
        """It has the next turn. One moves at most: on from there, to the smallest; those in `kept` only if there is
        nobody else."""
        for _ in range(count):
            self.last_handle += 1
            places, smallest = {handle: self.place_of(handle) for handle in self.here}, min(self.batches.sizes)
            index = self.batches.join(self.last_handle, lambda handle: handle in kept)
            assert index == self.batches.next_turn(lambda _: True) == self.place_of(self.last_handle)
            moved = [handle for handle in self.here if self.place_of(handle) != places[handle]]
            assert len(moved) <= 1
            for handle in moved:
                others = [other for other in self.here if places[other] == index]
                assert self.batches.sizes[self.place_of(handle)] == smallest + 1
                assert handle in others
                assert handle not in kept or kept.issuperset(others)
            self.here.append(self.last_handle)

    @precondition(lambda self: self.here)
    @rule(pick=st.integers(0, 1_000), pinned=st.sets(st.integers(1, 30)))
    def leave(self, pick: int, pinned: set[int]) -> None:
        """Those in `pinned` move only if there is nobody else to move."""
        places = {handle: self.place_of(handle) for handle in self.here}
        gone = self.here.pop(pick % len(self.here))
        left = places.pop(gone)
        self.batches.leave(gone, lambda handle: int(handle in pinned))
        moved = [handle for handle in self.here if self.place_of(handle) != places[handle]]
        assert len(moved) <= 1
        for handle in moved:
            others = [other for other in self.here if places[other] == places[handle]]
            assert self.place_of(handle) == left
            assert handle not in pinned or pinned.issuperset(others)

    @rule(count=st.integers(1, 5), pinned=st.sets(st.integers(1, 30)))
    def resize(self, count: int, pinned: set[int]) -> None:
        """As even as ever. Whose turn it was is forgotten if it is gone."""
        self.count = count
        self.batches.resize(count, lambda handle: int(handle in pinned))
        assert len(self.batches.sizes) == count
        if self.last_turn is not None and self.last_turn >= count:
            self.last_turn = None

    @rule(idle=st.sets(st.integers(0, 4)))
    def turn(self, idle: set[int]) -> None:
        """A microbatch's turn; those in `idle` have nothing to run."""
        index = self.batches.next_turn(lambda index: index not in idle)
        busy = [index for index in range(self.count) if index not in idle]
        assert (index is None) == (not busy)
        if index is None:
            return
        assert index in busy
        assert index != self.last_turn or busy == [index]
        self.batches.take_turn(index)
        self.last_turn = index

    def place_of(self, handle: int) -> int:
        return next(index for index in range(self.count) if handle in self.batches.members(index))

    @invariant()
    def nobody_is_lost(self) -> None:
        self.batches.check_integrity()
        members = [handle for index in range(self.count) for handle in self.batches.members(index)]
        assert sorted(members) == sorted(self.here)

    @invariant()
    def sizes_are_within_one(self) -> None:
        assert max(self.batches.sizes) - min(self.batches.sizes) <= 1


TestMicrobatches = MicrobatchMachine.TestCase
TestMicrobatches.settings = settings(max_examples=60, deadline=None)


@given(st.integers(1, 5))
def test_turns_are_fair(count: int) -> None:
    """While all have work, each of n microbatches has one of any n turns that follow each other."""
    batches, turns = Microbatches(count), []
    for _ in range(3 * count):
        index = batches.next_turn(lambda _: True)
        assert index is not None
        batches.take_turn(index)
        turns.append(index)
    for start in range(2 * count):
        assert sorted(turns[start : start + count]) == list(range(count))


def test_asking_whose_turn_it_is_does_not_take_it() -> None:
    batches = Microbatches(2)
    assert batches.next_turn(lambda _: True) == batches.next_turn(lambda _: True) == 0


def test_with_fewer_sequences_than_microbatches_there_is_one_each() -> None:
    batches = Microbatches(3)
    assert (batches.join(7), batches.join(8)) == (0, 0)
    assert (batches.members(0), batches.members(1)) == ((8,), (7,))
    assert batches.sizes == (1, 1, 0)


def of_six() -> Microbatches:
    """(0, 2, 4), (1, 3, 5)."""
    batches = Microbatches(2)
    for handle in range(6):
        batches.take_turn(batches.join(handle))
    return batches


def test_who_joins_has_the_next_turn_and_who_has_been_there_longest_moves_on() -> None:
    batches = of_six()
    batches.take_turn(0)
    assert (batches.join(6), batches.join(7)) == (1, 1)
    assert (batches.members(0), batches.members(1)) == ((0, 2, 4, 1), (3, 5, 6, 7))


def test_those_that_have_joined_in_the_same_turn_are_kept_there() -> None:
    batches = of_six()
    for handle in (6, 7, 8, 9):
        batches.join(handle, lambda handle: handle >= 6)
    assert (batches.members(0), batches.members(1)) == ((4, 6, 7, 8, 9), (1, 3, 5, 0, 2))


def test_a_difference_of_two_is_one_too_much() -> None:
    batches = of_six()
    batches.leave(1, lambda _: 0)
    assert batches.sizes == (3, 2)
    batches.leave(3, lambda _: 0)
    assert batches.sizes == (2, 2)


def test_the_one_that_moves_is_the_cheapest_and_of_several_the_latest() -> None:
    batches = of_six()
    for handle in (1, 3):
        batches.leave(handle, lambda handle: 1 if handle == 4 else 0)
    assert (batches.members(0), batches.members(1)) == ((0, 4), (5, 2))


def test_one_sequence_is_in_one_microbatch() -> None:
    batches = Microbatches(2)
    batches.join(1)
    with pytest.raises(Bug, match="sequence 1"):
        batches.join(1)
    with pytest.raises(ValueError, match="at least one"):
        Microbatches(0)


def test_a_sequence_in_two_microbatches_is_found() -> None:
    batches = Microbatches(2)
    batches.join(1)
    batches._members[1].append(1)
    with pytest.raises(Bug, match="do not add up"):
        batches.check_integrity()


def test_microbatches_that_are_uneven_are_found() -> None:
    batches = of_six()
    batches._members[0].remove(0)
    batches._members[1].append(0)
    batches._where[0] = 1
    with pytest.raises(Bug, match="uneven"):
        batches.check_integrity()
