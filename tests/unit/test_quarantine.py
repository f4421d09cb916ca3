"""Why pages wait for proof: a write that is late lands in whatever sequence has its pages by then.

The real broker's book, decode scheduler and allocator, over the in-memory twin. In each round a prefill instance dies
with its writes in flight; another prompt takes what pages there are; then the late bytes land.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.ticket import Action, Close, Commit, Ticket, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.transfer.base import Piece
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.memory import MemoryEndpoint, MemoryFabric
from tests.support.instances import DECODE, PREFILL, instance_of
from tests.support.spans import spans_of

ROUNDS = 1_000
NUM_PAGES, PAGE_SIZE, PAGE_BYTES = 12, 4, 64
NEW_TOKENS = 2


class DecodeSide:
    """A decode instance of one stage, whose commands are applied as soon as they are issued."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.scheduler = DecodeScheduler(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_microbatches=1, max_running=4, schedule_conservativeness=0.0
        )
        self.pool = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
        self.endpoint = MemoryEndpoint(fabric, "decode")
        self.key = self.endpoint.publish(self.endpoint.register(self.pool))
        self.book, self.fences = TicketBook("x"), Fences()

    def take(self, number: int, prompt_tokens: int, epoch: int) -> tuple[Ticket, Sequence[int]]:
        """A request of that prompt, up to the first write: its ticket and its pages."""
        prefill = instance_of("p", PREFILL, epoch=epoch, sizes=(4,))
        request = RequestRef("r", number)
        ticket = self.book.open(request, prefill, instance_of("d", DECODE, sizes=(4,)), prompt_tokens, NEW_TOKENS)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        self.scheduler.submit(request, sampling, prompt_tokens, ticket.ticket_id)
        self.scheduler.reserve(ticket.ticket_id, request)
        (admission,) = self.scheduler.poll().admissions
        self.book.reserved(ticket)
        assert self.book.fill(ticket)
        return ticket, admission.pages

    def carry_out(self, actions: list[Action]) -> None:
        """What the broker tells the decode head."""
        for action in actions:
            if isinstance(action, Commit):
                assert self.scheduler.commit(action.ticket.ticket_id)
                self.book.release(action.ticket)
            elif isinstance(action, Close) and action.instance == action.ticket.decode:
                self.scheduler.close_ticket(action.ticket.ticket_id, quiesced=action.quiesced, reason="so")

    def finish(self, ticket: Ticket) -> None:
        """The sequence makes its tokens and ends; its pages are free."""
        self.scheduler.first_token(ticket.request, 5)
        while self.scheduler.pages.num_used:
            for command in self.scheduler.poll().commands:
                self.scheduler.applied(command.number)
                if command.step is not None:
                    self.scheduler.result(command.step.number, torch.full((len(command.step.rows),), 7).numpy())


class Writer:
    """A prefill instance of one stage, whose KV is one byte again and again."""

    def __init__(self, fabric: MemoryFabric, name: str, byte: int) -> None:
        self.endpoint, self.byte = MemoryEndpoint(fabric, name), byte
        self._source = torch.full((NUM_PAGES * PAGE_BYTES,), byte, dtype=torch.uint8)
        self._address = self.endpoint.register(self._source).address

    def write(self, side: DecodeSide, pages: Sequence[int]) -> Transfer:
        pieces = [Piece(self._address, side.key.address + page * PAGE_BYTES, PAGE_BYTES) for page in pages]
        return self.endpoint.write(side.key, pieces)


async def play_round(side: DecodeSide, fabric: MemoryFabric, number: int, rng: random.Random) -> bool:
    """True if a sequence's KV was corrupted."""
    dying, other = Writer(fabric, f"p@{number}", 1), Writer(fabric, f"other@{number}", 2)
    fabric.hold()
    lost, its_pages = side.take(2 * number, rng.randint(1, 4 * PAGE_SIZE), epoch=number)
    late = dying.write(side, its_pages)
    await fabric.faults.parked.wait()
    fabric.end(dying.endpoint.name)
    side.carry_out(side.book.lose(lost.prefill))
    side.fences.reaped(lost.prefill, None)
    read = asyncio.ensure_future(side.endpoint.read_out())  # it is reaped: the target reads what it had sent

    ticket, pages = side.take(2 * number + 1, rng.randint(1, 4 * PAGE_SIZE), epoch=number + ROUNDS)
    fabric.hold(after_batches=NUM_PAGES)
    await other.write(side, pages).wait()
    side.carry_out(side.book.report(ticket, 0, WriterOutcome(spans_of([(0, 0, len(pages))]))))
    assert not read.done()
    fabric.release()  # the late bytes land
    corrupted = bool((side.pool[list(pages)] != other.byte).any())
    side.finish(ticket)

    await read
    await late.settle()
    assert side.fences.are_reaped(lost.prefill, lost.num_writers)
    side.carry_out(side.book.prove(lost))
    await other.endpoint.close()
    side.scheduler.check_integrity()
    assert (side.scheduler.pages.num_free, len(side.book)) == (NUM_PAGES, 0), "a page is lost"
    return corrupted


def play() -> int:
    """Of ROUNDS, those in which a sequence was corrupted."""

    async def run() -> int:
        fabric, rng = MemoryFabric(), random.Random(7)
        side = DecodeSide(fabric)
        return sum([await play_round(side, fabric, number, rng) for number in range(ROUNDS)])

    return asyncio.run(run())


def test_with_quarantine_no_late_write_ever_corrupts_a_sequence() -> None:
    assert play() == 0


def test_without_quarantine_late_writes_do_corrupt_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(pages: PageAllocator, ticket_id: str, held: Sequence[int]) -> None:
        pages.release(held)

    monkeypatch.setattr(PageAllocator, "quarantine", release)
    corrupted = play()
    print(f"{corrupted} of {ROUNDS} sequences corrupted")
    assert corrupted > ROUNDS // 2
