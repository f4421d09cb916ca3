"""The broker dies at any moment in the life of tickets: none is left, and no page is free while it may be written."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagemesh.shared.core.tickets import LegState
from tests.support.crash_lives import Both, Mesh, Rank

PICK, LOST = st.integers(0, 50), st.booleans()


class CrashMachine(RuleBasedStateMachine):
    """Heads, stages and messages in any order. `pick`s choose a ticket, a stage or a message."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = Mesh()

    def one(self, pick: int, wanted: Callable[[Both], bool]) -> Both | None:
        found = [both for both in self.mesh.all if wanted(both)]
        return found[pick % len(found)] if found else None

    def stage(self, pick: int, wanted: Callable[[Both, Rank], bool]) -> tuple[Both, int] | None:
        found = [(both, at) for both in self.mesh.all for at, rank in enumerate(both.ranks) if wanted(both, rank)]
        return found[pick % len(found)] if found else None

    @rule()
    def open(self) -> None:
        self.mesh.open()

    @rule(pick=PICK, lost=LOST)
    def reserve(self, pick: int, lost: bool) -> None:
        if (both := self.one(pick, lambda b: b.prefill is LegState.WAITING)) is not None:
            self.mesh.reserve(both, lost=lost)

    @rule(pick=PICK, lost=LOST)
    def fill(self, pick: int, lost: bool) -> None:
        if (both := self.one(pick, lambda b: b.prefill is LegState.RESERVED)) is not None:
            self.mesh.fill(both, lost=lost)

    @rule(pick=PICK, lost=LOST)
    def unreserve(self, pick: int, lost: bool) -> None:
        if (both := self.one(pick, lambda b: b.decode is LegState.RESERVED)) is not None:
            self.mesh.unreserve(both, lost=lost)

    @rule(pick=PICK, count=st.integers(1, 12))
    def write(self, pick: int, count: int) -> None:
        if (at := self.stage(pick, lambda b, r: b.prefill is LegState.FILLING and bool(r.left))) is not None:
            rank = at[0].ranks[at[1]]
            rank.in_flight += rank.left[:count]
            del rank.left[:count]

    @rule(pick=PICK, count=st.integers(1, 12))
    def land(self, pick: int, count: int) -> None:
        if (at := self.stage(pick, lambda _, r: bool(r.in_flight))) is not None:
            rank = at[0].ranks[at[1]]
            rank.landed += rank.in_flight[:count]
            del rank.in_flight[:count]

    @rule(pick=PICK, in_doubt=st.booleans())
    def break_down(self, pick: int, in_doubt: bool) -> None:
        if (at := self.stage(pick, lambda b, r: b.prefill is LegState.FILLING and bool(r.in_flight))) is not None:
            rank = at[0].ranks[at[1]]
            rank.error, rank.in_doubt, rank.left, rank.in_flight = "broken", in_doubt, [], []

    @rule(pick=PICK, lost=LOST)
    def report(self, pick: int, lost: bool) -> None:
        if (at := self.stage(pick, self.has_to_report)) is not None:
            self.mesh.report(*at, lost=lost)

    @staticmethod
    def has_to_report(both: Both, rank: Rank) -> bool:
        done = not rank.in_flight and (both.prefill is LegState.ENDING or not rank.left)
        return both.unsettled and rank.heard_by is None and done

    @rule(pick=PICK)
    def prefill_gives_up(self, pick: int) -> None:
        if (both := self.one(pick, lambda b: b.prefill in (LegState.WAITING, LegState.RESERVED))) is not None:
            self.mesh.prefill_lets_go(both)
            both.prefill_fails = True

    @rule(pick=PICK)
    def prefill_gives_up_writing(self, pick: int) -> None:
        if (both := self.one(pick, lambda b: b.prefill is LegState.FILLING)) is not None:
            self.mesh.prefill_lets_go(both)
            both.prefill_fails = True

    @rule(pick=PICK)
    def decode_gives_up(self, pick: int) -> None:
        if (both := self.one(pick, lambda b: b.decode in (LegState.WAITING, LegState.RESERVED))) is not None:
            self.mesh.decode_lets_go(both)
            both.decode_fails = True

    @rule(pick=PICK)
    def tell(self, pick: int) -> None:
        if (both := self.one(pick, lambda b: b.prefill_fails or b.decode_fails)) is not None:
            self.mesh.tell_failures(both)

    @rule(pick=PICK)
    def deliver(self, pick: int) -> None:
        if self.mesh.letters:
            self.mesh.deliver(pick)

    @rule(prefill_first=st.booleans())
    def crash(self, prefill_first: bool) -> None:
        self.mesh.crash(prefill_first=prefill_first)

    @invariant()
    def nothing_is_written_where_it_is_not_expected(self) -> None:
        for both in self.mesh.all:
            if both.may_be_written:
                assert both.decode in (LegState.RESERVED, LegState.ENDING)
                assert both.decode_pages == both.prefill_pages

    def teardown(self) -> None:
        """Everybody gives up what has not begun, and does the rest: whatever has happened, only doubts are left."""
        for _ in range(4 * len(self.mesh.all) + 4):
            for both in self.mesh.all:
                self.bring_on(both)
            while self.mesh.letters:
                self.mesh.deliver(0)
        for both in self.mesh.all:
            doubt = any(rank.in_doubt for rank in both.ranks)
            assert both.prefill is None
            assert both.decode is (LegState.ENDING if doubt else both.decode)
            assert doubt or both.decode in (None, LegState.COMMITTED)
            assert (self.mesh.ticket(both) is not None) == doubt

    def bring_on(self, both: Both) -> None:
        if both.prefill in (LegState.WAITING, LegState.RESERVED):
            self.mesh.prefill_lets_go(both)
            both.prefill_fails = True
        elif both.prefill is LegState.FILLING:
            for rank in both.ranks:
                rank.landed += rank.in_flight + rank.left
                rank.in_flight, rank.left = [], []
        elif both.prefill is LegState.ENDING:
            for rank in both.ranks:
                rank.landed += rank.in_flight
                rank.in_flight = []
        self.mesh.tell_failures(both)
        for at, rank in enumerate(both.ranks):
            if self.has_to_report(both, rank):
                self.mesh.report(both, at, lost=False)


TestCrashes = CrashMachine.TestCase
TestCrashes.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
