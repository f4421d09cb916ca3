"""Tickets in any order of events: no page is told free while something may still write to it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stagemesh.services.broker.ticket import Action, Commit, Verify
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.errors import Cancelled
from stagemesh.shared.fsm.ticket import TicketState
from tests.support.ticket_lives import Life, Writer, life_of, open_ticket

WRITTEN = (TicketState.FILLING, TicketState.QUIESCING)


class TicketMachine(RuleBasedStateMachine):
    """Heads, writers and messages in any order. `pick`s choose a ticket and a writer."""

    @initialize(writers=st.sampled_from([[4], [2, 2], [1, 3]]), sinks=st.sampled_from([[4], [3, 1], [1, 1, 2]]))
    def build(self, writers: list[int], sinks: list[int]) -> None:
        self.book = TicketBook("x")
        self.sizes = writers, sinks
        self.lives: list[Life] = []
        self.lost: set[str] = set()

    @rule(far=st.integers(0, 4))
    def open(self, far: int) -> None:
        """A ticket, and how far it gets at once."""
        if self.lost:
            return
        self.lives.append(life_of(open_ticket(self.book, *self.sizes)))
        life = self.lives[-1]
        if far > 0:
            self.book.reserved(life.ticket)
        if far > 1:
            self.book.fill(life.ticket)
            life.announced = True
        if far > 2:
            life.begun = True
        if far > 3:
            for writer in life.writers:
                writer.in_flight, writer.left = writer.left[:4], writer.left[4:]

    def live(self, pick: int, *states: TicketState) -> Life | None:
        """An open ticket in one of `states`, or in any."""
        found = [life for life in self.lives if self.is_open(life) and life.ticket.state in (states or TicketState)]
        return found[pick % len(found)] if found else None

    def is_open(self, life: Life) -> bool:
        try:
            return self.book.get(life.ticket.ticket_id) is life.ticket
        except Cancelled:
            return False

    @rule(pick=st.integers(0, 20))
    def reserve(self, pick: int) -> None:
        if (life := self.live(pick, TicketState.OPENED, TicketState.RESERVED)) is not None:
            self.book.reserved(life.ticket)

    @rule(pick=st.integers(0, 20))
    def unreserve(self, pick: int) -> None:
        """The decode side wants its pages back."""
        life = self.live(pick)
        if life is not None and self.book.unreserve(life.ticket):
            assert not life.announced
            assert not life.may_be_written

    @rule(pick=st.integers(0, 20))
    def fill(self, pick: int) -> None:
        """Announced, and perhaps again: the answer was lost."""
        found = [TicketState.RESERVED, TicketState.FILLING, TicketState.OPENED]
        life = self.live(pick, *found)
        if life is None or life.never or "p" in self.lost:
            return
        if life.ticket.state is not TicketState.OPENED or life.ticket.taken_back:
            life.announced |= self.book.fill(life.ticket)

    @rule(pick=st.integers(0, 20))
    def begin(self, pick: int) -> None:
        """The answer to the announcement reaches the prefill head."""
        found = [life for life in self.lives if life.announced and not life.begun and not life.never]
        if found and "p" not in self.lost:
            found[pick % len(found)].begun = True

    @rule(pick=st.integers(0, 200), count=st.integers(1, 12))
    def write(self, pick: int, count: int) -> None:
        for writer in self.writing(pick):
            sent, writer.left = writer.left[:count], writer.left[count:]
            writer.in_flight += sent

    @rule(pick=st.integers(0, 200), count=st.integers(1, 12))
    def land(self, pick: int, count: int) -> None:
        for writer in self.writing(pick, also_cancelled=True):
            writer.landed += writer.in_flight[:count]
            del writer.in_flight[:count]

    @rule(pick=st.integers(0, 200), in_doubt=st.booleans())
    def break_down(self, pick: int, in_doubt: bool) -> None:
        """What was in flight has failed; it is known to be over, or it is not."""
        for writer in self.writing(pick):
            if writer.in_flight:
                writer.error, writer.in_doubt, writer.in_flight, writer.cancelled = "broken", in_doubt, [], True

    def writing(self, pick: int, *, also_cancelled: bool = False) -> list[Writer]:
        """One writer that is at work, or none."""
        found = [
            writer
            for life in self.lives
            for writer in life.writers
            if life.begun and not writer.reported and (also_cancelled or not writer.cancelled)
        ]
        return [found[pick % len(found)]] if found else []

    @rule(pick=st.integers(0, 200))
    def report(self, pick: int) -> None:
        """A writer that is done, or has given up, and has nothing in flight."""
        found = [(life, rank, w) for life in self.lives if life.begun for rank, w in enumerate(life.writers)]
        found = [
            at for at in found if not at[2].reported and not at[2].in_flight and (at[2].cancelled or not at[2].left)
        ]
        if found and "p" not in self.lost:
            life, rank, writer = found[pick % len(found)]
            writer.reported = True
            if self.is_open(life):
                self.carry_out(self.book.report(life.ticket, rank, writer.outcome()))

    @rule(pick=st.integers(0, 200))
    def report_again(self, pick: int) -> None:
        """Its first answer was lost."""
        found = [(life, rank, w) for life in self.lives for rank, w in enumerate(life.writers) if w.reported]
        if found:
            life, rank, writer = found[pick % len(found)]
            if self.is_open(life) and life.ticket.state in WRITTEN:
                self.carry_out(self.book.report(life.ticket, rank, writer.outcome()))

    @rule(pick=st.integers(0, 20))
    def decode_side_fails_it(self, pick: int) -> None:
        if (life := self.live(pick)) is not None:
            self.carry_out(self.book.fail(life.ticket, "aborted there"))

    @rule(pick=st.integers(0, 20))
    def prefill_side_fails_it(self, pick: int) -> None:
        life = self.live(pick)
        if life is not None and "p" not in self.lost:
            self.prefill_gives_up(life)

    @rule(pick=st.integers(0, 20))
    def prefill_is_told(self, pick: int) -> None:
        """A close reaches the prefill head, and its answer the broker."""
        found = [life for life in self.lives if life.prefill_told]
        if not found:
            return
        life = found[pick % len(found)]
        life.prefill_told.pop()
        quiescent = life.give_up()
        if quiescent and "p" not in self.lost and life.ticket.state is TicketState.QUIESCING and self.is_open(life):
            self.carry_out(self.book.fail(life.ticket, life.ticket.reason, quiescent=True))

    @rule(pick=st.integers(0, 20))
    def release(self, pick: int) -> None:
        """The answer to a commit: once, however late."""
        found = [life for life in self.lives if life.committed]
        if found:
            life = found[pick % len(found)]
            life.committed = False
            self.book.release(life.ticket)

    @rule(role=st.sampled_from(["p", "d"]), dice=st.integers(0, 30))
    def lose(self, role: str, dice: int) -> None:
        if dice != 7 or role in self.lost or not self.lives:
            return
        self.lost.add(role)
        if role == "p":
            for life in self.lives:  # its bytes may be anywhere
                life.never |= not life.begun
                for writer in life.writers:
                    writer.cancelled = True
                    writer.in_doubt |= bool(writer.in_flight)
        ref = self.lives[0].ticket.prefill if role == "p" else self.lives[0].ticket.decode
        self.carry_out(self.book.lose(ref))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            life = next(life for life in self.lives if life.ticket is action.ticket)
            assert not isinstance(action, Verify), "nobody sums anything here"
            if isinstance(action, Commit):
                assert all(writer.reported and not writer.left for writer in life.writers)
                assert not life.told_free
                life.committed = life.told_free = True
            elif action.instance == life.ticket.prefill:
                life.prefill_told.append(action)
                continue
            elif not action.quiesced:
                assert not life.told_free
                continue
            assert not life.may_be_written, "told free while a writer may write"
            life.told_free = True

    @invariant()
    def the_book_adds_up(self) -> None:
        if not hasattr(self, "book"):
            return
        counts = self.book.by_state()
        assert sum(counts.values()) == len(self.book) == sum(map(self.is_open, self.lives))
        assert counts["closed"] == 0
        for life in self.lives:
            if not self.is_open(life) and "d" not in self.lost:
                assert life.told_free

    def teardown(self) -> None:
        """Whatever has happened: once every writer has come to its end, nothing is left but what is in doubt."""
        if not hasattr(self, "book") or self.lost:
            return
        for life in self.lives:
            for writer in life.writers:
                writer.in_flight = []
            self.prefill_gives_up(life)
            while life.prefill_told:
                self.prefill_is_told(0)
        for _ in range(sum(len(life.writers) for life in self.lives)):
            self.report(0)
        for life in self.lives:
            self.prefill_gives_up(life)
            if life.committed:
                self.release(0)
        for life in self.lives:
            assert self.is_open(life) == any(writer.in_doubt for writer in life.writers)

    def prefill_gives_up(self, life: Life) -> None:
        if self.is_open(life):
            self.carry_out(self.book.fail(life.ticket, "aborted here", quiescent=life.give_up()))


TestTickets = TicketMachine.TestCase
TestTickets.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
