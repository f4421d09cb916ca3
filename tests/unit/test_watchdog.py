"""Who is overdue, as decisions without processes."""

from __future__ import annotations

from stagemesh.shared.runtime.watchdog import LATE_S, STARVED_TIMES, Watchdog

TIMEOUT_S = 4.0


def test_who_is_silent_for_the_timeout_is_overdue_once() -> None:
    dog = Watchdog(TIMEOUT_S)
    assert dog.overdue(10.0, [1, 2]) == []
    dog.heard(1, 12.0)
    assert dog.deadline_s == 14.0
    assert dog.overdue(14.0, [1, 2]) == [2]
    assert dog.overdue(15.0, [1, 2]) == []
    assert dog.deadline_s == 16.0
    assert dog.overdue(16.0, [1, 2]) == [1]
    assert dog.deadline_s is None


def test_who_says_that_it_is_stuck_is_overdue_at_once() -> None:
    dog = Watchdog(TIMEOUT_S)
    dog.overdue(10.0, [1, 2])
    dog.trigger(2)
    assert dog.overdue(10.1, [1, 2]) == [2]
    assert dog.overdue(10.2, [1, 2]) == []


def test_a_pid_that_is_given_to_another_process_begins_anew() -> None:
    dog = Watchdog(TIMEOUT_S)
    dog.overdue(10.0, [1])
    assert dog.overdue(14.0, [1]) == [1]
    assert dog.overdue(14.1, []) == []
    assert dog.overdue(14.2, [1]) == []
    assert dog.overdue(18.2, [1]) == [1]


def test_a_watcher_that_was_away_blames_nobody_for_it() -> None:
    dog = Watchdog(TIMEOUT_S)
    dog.overdue(10.0, [1, 2])
    dog.heard(1, 13.0)
    back_s = 14.0 + LATE_S + 100.0
    assert dog.overdue(back_s, [1, 2]) == []
    dog.heard(1, back_s + 1.0)
    assert dog.deadline_s == back_s + TIMEOUT_S
    assert dog.overdue(dog.deadline_s, [1, 2]) == [2]


def test_nobody_to_watch_is_nothing_to_do() -> None:
    dog = Watchdog(TIMEOUT_S)
    assert (dog.overdue(1.0, []), dog.deadline_s) == ([], None)


class Starved:
    """Of process 1; of what the others wait, nothing is known."""

    def __init__(self) -> None:
        self.waited_s = 100.0
        self.dog = Watchdog(TIMEOUT_S, lambda pid: self.waited_s if pid == 1 else 0.0)


def test_the_time_that_one_waits_for_a_core_does_not_count() -> None:
    starved = Starved()
    starved.dog.overdue(10.0, [1, 2])
    starved.waited_s += 3.0
    assert starved.dog.overdue(14.0, [1, 2]) == [2]
    assert starved.dog.deadline_s == 17.0
    assert starved.dog.overdue(17.0, [1]) == [1], "it had a core for the whole timeout by now"


def test_who_is_heard_has_the_whole_time_again_in_which_it_waits_for_nothing() -> None:
    starved = Starved()
    starved.dog.overdue(10.0, [1])
    starved.waited_s += 3.0
    assert starved.dog.overdue(14.0, [1]) == []
    starved.dog.heard(1, 15.0)
    assert starved.dog.deadline_s == 19.0
    assert starved.dog.overdue(19.0, [1]) == [1]


def test_one_that_is_silent_for_many_timeouts_is_overdue_though_it_waits_for_a_core() -> None:
    starved = Starved()
    now_s = 10.0
    while not starved.dog.overdue(now_s, [1]):
        now_s += 0.5
        starved.waited_s += 2.0  # four threads wait
    assert now_s == 10.0 + STARVED_TIMES * TIMEOUT_S


def test_threads_that_have_ended_take_what_they_waited_with_them() -> None:
    starved = Starved()
    starved.dog.overdue(10.0, [1])
    starved.waited_s -= 50.0
    assert starved.dog.overdue(14.0, [1]) == [1]
