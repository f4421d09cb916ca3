"""A head asks every stage, and hears when all have answered."""

from __future__ import annotations

import asyncio

import pytest

from stagemesh.shared.stage.questions import Questions, Said


def test_it_is_over_when_every_stage_has_answered_its_own_question() -> None:
    async def run() -> None:
        asked: list[int] = []
        questions = Questions()
        first, second = (asyncio.ensure_future(questions.ask(2, asked.append)) for _ in range(2))
        await asyncio.sleep(0)
        assert asked == [1, 2]
        questions.answered(1, 0, "stage 0 says no", 2)
        questions.answered(1, 0, "")
        questions.answered(2, 1, "")
        await asyncio.sleep(0)
        assert not first.done()
        questions.answered(1, 1, "stage 1 too", 3)
        assert await first == Said("stage 0 says no", 5)
        assert not second.done()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        questions.answered(2, 0, "")  # too late

    asyncio.run(run())
