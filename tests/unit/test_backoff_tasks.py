"""Trying again, and tasks that come and go under one supervisor."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.runtime import backoff
from stagemesh.shared.runtime.backoff import delays, retry
from stagemesh.shared.runtime.tasks import Tasks


def test_delays_double_up_to_a_limit_and_are_spread() -> None:
    whole_s = [0.1, 0.2, 0.4, 0.5, 0.5]
    drawn = [list(islice(delays(0.1, 0.5), 5)) for _ in range(50)]
    for draw in drawn:
        assert all(whole / 2 <= delay <= whole for delay, whole in zip(draw, whole_s, strict=True))
    assert len({draw[0] for draw in drawn}) > 1


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "delays", lambda: iter([0.0] * 100))


@pytest.mark.usefixtures("no_delay")
def test_what_may_succeed_later_is_tried_again() -> None:
    attempts: list[int] = []

    async def attempt() -> str:
        attempts.append(len(attempts))
        if len(attempts) < 4:
            raise Retryable("not yet")
        return "done"

    assert asyncio.run(retry(attempt)) == "done"
    assert len(attempts) == 4


@pytest.mark.usefixtures("no_delay")
def test_what_stays_wrong_is_not_tried_again() -> None:
    attempts: list[int] = []

    async def attempt() -> None:
        attempts.append(1)
        raise Rejected("field", "is wrong")

    with pytest.raises(Rejected):
        asyncio.run(retry(attempt))
    assert len(attempts) == 1


def test_a_cancellation_ends_the_trying() -> None:
    async def main() -> None:
        tried = asyncio.Event()

        async def attempt() -> None:
            tried.set()
            raise Retryable("never")

        trying = asyncio.create_task(retry(attempt))
        await tried.wait()
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying

    asyncio.run(main())


def test_tasks_run_under_the_supervisor_also_those_spawned_early() -> None:
    async def main() -> None:
        tasks, done = Tasks(), asyncio.Queue[str]()
        tasks.spawn(done.put("early"))
        assert (len(tasks), done.qsize()) == (1, 0)
        running = asyncio.create_task(tasks.run())
        assert await done.get() == "early"
        tasks.spawn(done.put("late"))
        assert await done.get() == "late"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(tasks) == 0

    asyncio.run(main())


def test_a_task_that_fails_ends_the_others_and_the_supervisor() -> None:
    async def fail() -> None:
        raise Rejected("field", "is wrong")

    async def main() -> None:
        tasks, cancelled = Tasks(), asyncio.Event()

        async def wait() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()

        tasks.spawn(wait())
        tasks.spawn(fail())
        with pytest.raises(ExceptionGroup) as caught:
            await tasks.run()
        assert caught.group_contains(Rejected, match="is wrong")
        assert (cancelled.is_set(), len(tasks)) == (True, 0)

    asyncio.run(main())


def test_what_never_started_never_will() -> None:
    async def main() -> None:
        tasks = Tasks()
        tasks.spawn(asyncio.sleep(0))
        tasks.close()
        assert len(tasks) == 0

    asyncio.run(main())


def test_what_is_spawned_while_a_failure_ends_the_service_is_dropped() -> None:
    """Who lets go of many things, each with a task, lets go of all of them."""

    async def fail() -> None:
        raise Rejected("field", "is wrong")

    async def main() -> None:
        tasks, started = Tasks(), list[int]()

        async def note(number: int) -> None:
            started.append(number)

        async def let_go() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                for number in range(3):
                    tasks.spawn(note(number))
                started.append(-1)

        tasks.spawn(let_go())
        tasks.spawn(fail())
        with pytest.raises(ExceptionGroup) as caught:
            await tasks.run()
        assert caught.group_contains(Rejected, match="is wrong")
        assert (started, len(tasks)) == ([-1], 0)

    asyncio.run(main())
