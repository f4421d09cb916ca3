"""Sending KV between two cuts of a model: every byte where it belongs, nothing else touched, and true outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.errors import Exhausted
from stagemesh.shared.stage.kv_sender import Outcome, PieceSpan
from stagemesh.shared.transfer.base import Lane, Piece, RegionKey
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.memory import MemoryEndpoint
from tests.support.kv_bench import LAYER_BYTES, NUM_PAGES, PAGE_SIZE, Bench, run


@st.composite
def cuts(draw: st.DrawFn, num_layers: int) -> list[int]:
    marks = sorted(draw(st.sets(st.sampled_from(range(1, num_layers))))) if num_layers > 1 else []
    return [hi - lo for lo, hi in zip([0, *marks], [*marks, num_layers], strict=True)]


PAGES = st.permutations(range(NUM_PAGES))
TOKENS = st.integers(1, NUM_PAGES // 2 * PAGE_SIZE)
CHUNKS = st.lists(st.integers(1, 3 * PAGE_SIZE), min_size=1, max_size=30)


def ends_of(chunks: list[int], num_tokens: int) -> list[int]:
    """Tokens done after each chunk; the last one takes the rest."""
    ends, done = [], 0
    for chunk in chunks:
        done += chunk
        if done >= num_tokens:
            break
        ends.append(done)
    return [*ends, num_tokens]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.integers(1, 6).flatmap(lambda n: st.tuples(cuts(n), cuts(n))),
    here=PAGES,
    there=PAGES,
    prompts=st.lists(st.tuples(TOKENS, CHUNKS), min_size=1, max_size=2),
    batch_pieces=st.integers(1, 4),
)
def test_all_kv_arrives_in_its_pages_and_nothing_else_is_touched(
    sizes: tuple[list[int], list[int]],
    here: list[int],
    there: list[int],
    prompts: list[tuple[int, list[int]]],
    batch_pieces: int,
) -> None:
    half = NUM_PAGES // 2
    moved = {
        there[number * half + index]: here[number * half + index]
        for number, (tokens, _) in enumerate(prompts)
        for index in range(pages_for(tokens, PAGE_SIZE))
    }

    async def body(bench: Bench) -> None:
        for sender in bench.senders:
            for number, (tokens, chunks) in enumerate(prompts):
                own = slice(number * half, number * half + pages_for(tokens, PAGE_SIZE))
                sender.join(number, bench.plan(f"t{number}", tokens, there[own]))
                for done in ends_of(chunks, tokens):
                    sender.progressed(number, here[own], done)
        outcomes = await bench.reports.wait_for(len(bench.senders) * len(prompts))
        bench.check_sinks(moved)
        for number, (tokens, _) in enumerate(prompts):
            mine = [outcome for outcome in outcomes if outcome.ticket_id == f"t{number}"]
            assert {(outcome.error, outcome.in_doubt) for outcome in mine} == {("", False)}
            num_layers = sum(len(layers) for layers in bench.writer_layers)
            assert sum(o.kv_bytes for o in mine) == pages_for(tokens, PAGE_SIZE) * num_layers * LAYER_BYTES
            check_every_piece(bench, mine, pages_for(tokens, PAGE_SIZE))

    run(body, *sizes, batch_pieces=batch_pieces)


def check_every_piece(bench: Bench, outcomes: list[Outcome], num_pages: int) -> None:
    """Each target has each page from every writer that has layers of it, once."""
    written = sorted((s.target_rank, page) for o in outcomes for s in o.spans for page in range(s.first, s.last))
    wanted = sorted(
        (rank, page)
        for rank, theirs in enumerate(bench.target_layers)
        for ours in bench.writer_layers
        if ours.intersect(theirs) is not None
        for page in range(num_pages)
    )
    assert written == wanted


def test_a_page_travels_once_and_only_when_its_last_token_is_there() -> None:
    async def body(bench: Bench) -> None:
        (sender,) = bench.senders
        bench.fabric.hold()
        sender.join(1, bench.plan("t", 10, [0, 1, 2]))
        for done in (3, 4, 7, 9):
            sender.progressed(1, [5, 6, 7], done)
            await asyncio.sleep(0)
        assert [(s.first, s.last) for s, _ in sender.unfinished[0].handles] == [(0, 1), (1, 2)]
        sender.progressed(1, [5, 6, 7], 10)
        bench.fabric.release()
        (outcome,) = await bench.reports.wait_for(1)
        assert outcome.spans == (PieceSpan(0, 0, 1), PieceSpan(0, 1, 2), PieceSpan(0, 2, 3))
        bench.check_sinks({0: 5, 1: 6, 2: 7})

    run(body, [2], [2])


def test_a_writer_reports_only_when_nothing_is_in_flight() -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.hold()
        bench.senders[0].join(1, bench.plan("t", 8, [3, 4]))
        bench.senders[0].progressed(1, [0, 1], 8)
        await bench.fabric.faults.parked.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert bench.reports.outcomes == []
        assert bench.senders[0].num_tickets == 1
        bench.fabric.release()
        (outcome,) = await bench.reports.wait_for(1)
        assert (outcome.error, outcome.in_doubt) == ("", False)

    run(body, [2], [2])


def test_after_a_cancel_nothing_new_is_written_and_what_runs_is_waited_for() -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        sender.join(1, bench.plan("t", 12, [3, 5, 7]))
        bench.fabric.hold(after_batches=1)
        sender.progressed(1, [0, 2, 4], 8)
        await bench.fabric.faults.parked.wait()
        sender.cancel(1)
        sender.progressed(1, [0, 2, 4], 12)
        await asyncio.sleep(0)
        assert bench.reports.outcomes == []
        bench.fabric.release()
        (outcome,) = await bench.reports.wait_for(1)
        assert (outcome.error, outcome.in_doubt) == ("cancelled", False)
        bench.check_sinks({3: 0, 5: 2})
        assert outcome.spans == (PieceSpan(0, 0, 2),)  # all of it was in flight by then, and has arrived

    run(body, [2], [2], batch_pieces=1)


def test_a_cancel_stops_what_has_not_been_submitted() -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        sender.join(1, bench.plan("t", 12, [3, 5, 7]))
        bench.fabric.hold()
        sender.progressed(1, [0, 2, 4], 12)
        await bench.fabric.faults.parked.wait()
        sender.cancel(1)
        bench.fabric.release()
        (outcome,) = await bench.reports.wait_for(1)
        assert outcome.error
        assert (outcome.spans, outcome.kv_bytes, outcome.in_doubt) == ((), 0, False)
        bench.check_sinks({3: 0})  # in flight when the cancel came; a piece that is there in part is none

    run(body, [2], [2], batch_pieces=1)


def test_a_cancel_that_is_too_late_changes_nothing() -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        sender.join(1, bench.plan("t", 4, [3]))
        sender.progressed(1, [0], 4)
        await bench.reports.wait_for(1)
        sender.cancel(1)
        sender.progressed(1, [0], 4)
        (outcome,) = bench.reports.outcomes
        assert (outcome.error, outcome.spans) == ("", (PieceSpan(0, 0, 1),))

    run(body, [2], [2])


def test_a_prompt_that_is_cancelled_before_its_first_page_is_reported_too() -> None:
    async def body(bench: Bench) -> None:
        for sender in bench.senders:
            sender.join(1, bench.plan("t", 9, [3, 4, 5]))
            sender.progressed(1, [0, 1, 2], 3)
            sender.cancel(1)
        outcomes = await bench.reports.wait_for(2)
        assert outcomes == [Outcome("t", (), 0, "cancelled", False)] * 2
        bench.check_sinks({})

    run(body)


@pytest.mark.parametrize("proven", [True, False])
def test_a_failure_names_itself_and_says_whether_bytes_may_still_arrive(proven: bool) -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        bench.fabric.faults.fail_next(1, proven=proven)
        sender.join(1, bench.plan("t", 8, [3, 4]))
        sender.progressed(1, [0, 1], 4)
        sender.progressed(1, [0, 1], 8)
        (outcome,) = await bench.reports.wait_for(1)
        assert "on demand" in outcome.error
        assert outcome.in_doubt == (not proven)
        assert outcome.spans == (PieceSpan(0, 1, 2),)
        assert outcome.kv_bytes == 2 * LAYER_BYTES
        bench.check_sinks({4: 1})

    run(body, [2], [2])


def test_after_a_failure_no_more_is_sent_and_the_prompts_end_is_not_waited_for() -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        bench.fabric.faults.fail_next(1)
        sender.join(1, bench.plan("t", 8, [3, 4]))
        sender.progressed(1, [0, 1], 4)
        (outcome,) = await bench.reports.wait_for(1)
        assert "on demand" in outcome.error
        sender.progressed(1, [0, 1], 8)
        assert (outcome.spans, outcome.in_doubt, sender.num_tickets) == ((), False, 0)
        bench.check_sinks({})

    run(body, [2], [2])


def test_a_doubt_outlives_the_cancel_that_follows_it() -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        bench.fabric.faults.fail_next(1, proven=False)
        sender.join(1, bench.plan("t", 8, [3, 4]))
        sender.progressed(1, [0, 1], 4)
        for _ in range(3):
            await asyncio.sleep(0)
        sender.cancel(1)
        (outcome,) = await bench.reports.wait_for(1)
        assert outcome.error
        assert outcome.in_doubt

    run(body, [2], [2])


def test_a_target_that_is_lost_fails_its_legs_and_no_other() -> None:
    async def body(bench: Bench) -> None:
        bench.fabric.faults.lose("d0")
        for sender in bench.senders:
            sender.join(1, bench.plan("t", 4, [3]))
            sender.progressed(1, [0], 4)
        outcomes = await bench.reports.wait_for(2)
        told = sorted((o.error, o.spans) for o in outcomes)
        assert told == [("", (PieceSpan(1, 0, 1),)), ("no endpoint d0", (PieceSpan(1, 0, 1),))]

    run(body, [2, 2], [1, 3])


class FullEndpoint(MemoryEndpoint):
    """Takes so many writes and no more."""

    room = 1

    def write(self, key: RegionKey, pieces: Sequence[Piece], lane: Lane = Lane.BULK) -> Transfer:
        if not self.room:
            raise Exhausted("too many writes are open")
        self.room -= 1
        return super().write(key, pieces, lane)


def test_a_write_that_is_refused_fails_its_ticket_and_not_the_stage() -> None:
    async def body(bench: Bench) -> None:
        bench.endpoints[0] = FullEndpoint(bench.fabric, "full")
        sender = bench.sender(0)
        sender.join(1, bench.plan("t", 8, [3, 4]))
        sender.progressed(1, [0, 1], 4)
        sender.progressed(1, [0, 1], 8)
        (outcome,) = await bench.reports.wait_for(1)
        assert "too many writes" in outcome.error
        assert (outcome.spans, outcome.in_doubt) == ((PieceSpan(0, 0, 1),), False)
        bench.check_sinks({3: 0})

    run(body, [2], [2])


def test_a_page_outside_of_the_targets_pool_fails_its_ticket_and_not_the_stage() -> None:
    async def body(bench: Bench) -> None:
        sender = bench.senders[0]
        sender.join(1, bench.plan("t", 8, [3, NUM_PAGES]))
        sender.progressed(1, [0, 1], 8)
        (outcome,) = await bench.reports.wait_for(1)
        assert "outside" in outcome.error
        assert (outcome.spans, outcome.in_doubt) == ((), False)
        bench.check_sinks({})

    run(body, [2], [2])
