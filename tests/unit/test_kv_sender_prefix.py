"""Sending prompts whose beginning was in the pool before: it leaves with the first chunk, from shared pages."""

from __future__ import annotations

import pytest

from stagemesh.shared.stage.kv_sender import PieceSpan
from tests.support.kv_bench import PAGE_SIZE, Bench, run


@pytest.mark.parametrize("first_chunk_ends", [2 * PAGE_SIZE + 1, 3 * PAGE_SIZE, 4 * PAGE_SIZE - 1])
def test_what_was_there_leaves_with_the_first_chunk_and_pages_may_be_sent_to_two_places(first_chunk_ends: int) -> None:
    """Pages 4 and 5 are shared; a prompt of two pages more computes from position 2 * PAGE_SIZE on."""

    async def body(bench: Bench) -> None:
        for sender in bench.senders:
            for handle, (own, there) in {1: ([6, 7], [0, 1, 2, 3]), 2: ([8, 9], [9, 8, 7, 6])}.items():
                sender.join(handle, bench.plan(f"t{handle}", 4 * PAGE_SIZE, there))
                for done in (first_chunk_ends, 4 * PAGE_SIZE):
                    sender.progressed(handle, [4, 5, *own], done)
        outcomes = await bench.reports.wait_for(4)
        bench.check_sinks({0: 4, 1: 5, 2: 6, 3: 7, 9: 4, 8: 5, 7: 8, 6: 9})
        pages = first_chunk_ends // PAGE_SIZE
        for outcome in outcomes:
            assert not outcome.error
            assert {(s.first, s.last) for s in outcome.spans} == {(0, pages), (pages, 4)}
            assert PieceSpan(1, 0, pages) in outcome.spans

    run(body)
