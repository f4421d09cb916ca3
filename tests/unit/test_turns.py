"""Whose client is served next: in order, a few at a time, and a slow one keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stagemesh.services.router.turns import Turns
from stagemesh.shared.engine.schedule.output import SequenceEnd
from tests.support.live_requests import begun

FOREVER_S = 3600.0
LIMIT_S = 30.0


def in_loop(work: Callable[[], None]) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


def test_places_are_given_in_the_order_of_asking() -> None:
    def work() -> None:
        turns, events = Turns(2, FOREVER_S), [asyncio.Event() for _ in range(5)]
        for event in events:
            turns.ask(event)
        assert [event.is_set() for event in events] == [True, True, False, False, False]
        turns.done(events[1])
        assert [event.is_set() for event in events] == [True, True, True, False, False]
        turns.done(events[3])  # it has gone before its turn
        turns.done(events[0])
        assert [event.is_set() for event in events] == [True, True, True, False, True]
        assert turns.num_waiting == 0

    in_loop(work)


def test_asking_again_takes_no_second_place() -> None:
    def work() -> None:
        turns, one, other = Turns(2, FOREVER_S), asyncio.Event(), asyncio.Event()
        for _ in range(3):
            turns.ask(one)
        turns.ask(other)
        assert other.is_set()
        turns.done(one)
        turns.done(one)
        third, fourth = asyncio.Event(), asyncio.Event()
        turns.ask(third)
        turns.ask(fourth)
        assert (third.is_set(), fourth.is_set()) == (True, False)

    in_loop(work)


def test_those_who_never_come_back_keep_nobody_waiting() -> None:
    async def run() -> None:
        turns, events = Turns(2, 0.001), [asyncio.Event() for _ in range(9)]
        for event in events:
            turns.ask(event)
        async with asyncio.timeout(LIMIT_S):
            for event in events:
                await event.wait()
        assert turns.num_waiting == 0

    asyncio.run(run())


def test_tokens_that_come_while_a_request_waits_for_its_turn_come_together_and_in_order() -> None:
    async def run() -> None:
        turns = Turns(1, FOREVER_S)
        (first, to_first), (second, to_second) = (begun(turns=turns), begun(turns=turns))
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            waiting = [group.create_task(live.next()) for live in (first, second)]
            await asyncio.sleep(0)
            for token_id in (1, 2, 3):
                to_first.say(token_id)
                to_second.say(token_id + 10)
            assert await waiting[0] == ([(1, None), (2, None), (3, None)], None)
            to_second.say(14, end=SequenceEnd.LENGTH)
            assert not waiting[1].done()
            last = group.create_task(first.next())  # its message is sent
            fresh, ending = await waiting[1]
            assert [token_id for token_id, _ in fresh] == [11, 12, 13, 14]
            assert ending is not None
            assert ending.end is SequenceEnd.LENGTH
            second.release()
            first.abort()
            assert (await last)[0] == []
            first.release()
        assert turns.num_waiting == 0

    asyncio.run(run())


def test_a_request_that_goes_away_gives_its_place_back() -> None:
    async def run() -> None:
        turns = Turns(1, FOREVER_S)
        pairs = [begun(turns=turns) for _ in range(3)]
        lives = [live for live, _ in pairs]
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            waiting = [group.create_task(live.next()) for live in lives]
            await asyncio.sleep(0)
            for index, (_, attempts) in enumerate(pairs):
                attempts.say(index)
            waiting[1].cancel()  # while it waits
            lives[1].release()
            await waiting[0]
            lives[0].release()  # while it sends
            assert await waiting[2] == ([(2, None)], None)

    asyncio.run(run())
