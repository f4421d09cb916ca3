"""Stopping in waves, as decisions without processes."""

from __future__ import annotations

import os
import signal

import pytest

from stagemesh.shared.runtime.drain import DrainSchedule, Stop
from stagemesh.shared.runtime.exits import ExitAction, describe_exit, on_exit

TERM, KILL = signal.SIGTERM, signal.SIGKILL
STOPS = (Stop("nats", 2, 5.0), Stop("decode", 1, 30.0), Stop("prefill", 1, 10.0), Stop("router", 0, 30.0))
ALL = frozenset(stop.name for stop in STOPS)


def test_a_wave_starts_when_the_one_before_is_gone() -> None:
    drain = DrainSchedule(STOPS)
    assert drain.step(0.0, ALL) == [("router", TERM)]
    assert drain.step(1.0, ALL) == []
    assert drain.step(2.0, ALL - {"router"}) == [("decode", TERM), ("prefill", TERM)]
    assert drain.step(3.0, frozenset({"nats", "decode"})) == []
    assert drain.step(4.0, frozenset({"nats"})) == [("nats", TERM)]
    assert drain.step(5.0, frozenset()) == []
    assert drain.deadline is None


def test_who_is_late_is_killed_once_and_waited_for() -> None:
    drain = DrainSchedule(STOPS)
    drain.step(0.0, ALL)
    drain.step(100.0, ALL - {"router"})
    alive = frozenset({"nats", "decode", "prefill"})
    deadlines = [drain.deadline]
    assert drain.step(110.0, alive) == [("prefill", KILL)]
    assert drain.step(111.0, alive) == []
    deadlines.append(drain.deadline)
    assert drain.step(130.0, alive) == [("decode", KILL)]
    deadlines.append(drain.deadline)
    assert deadlines == [110.0, 130.0, None]
    assert drain.step(131.0, frozenset({"nats"})) == [("nats", TERM)]


def test_those_that_died_before_their_wave_are_not_signalled() -> None:
    drain = DrainSchedule(STOPS)
    assert drain.step(0.0, frozenset({"decode", "nats"})) == [("decode", TERM)]
    assert drain.step(0.0, frozenset()) == []


def test_cutting_off_kills_everyone_once_whatever_their_wave() -> None:
    drain = DrainSchedule(STOPS)
    drain.step(0.0, ALL)
    drain.step(30.0, ALL)  # the router is killed for being late
    assert sorted(drain.cut_off()) == [("decode", KILL), ("nats", KILL), ("prefill", KILL)]
    assert drain.cut_off() == []
    assert drain.step(99.0, frozenset({"nats"})) == []


EXITED_0, EXITED_3, TERMINATED, KILLED = 0, 3 << 8, int(TERM), int(KILL)


@pytest.mark.parametrize("status", [EXITED_0, EXITED_3, TERMINATED, KILLED])
def test_before_all_are_ready_any_end_stops_all(status: int) -> None:
    assert on_exit(status, is_stopping=False, is_serving=False) is ExitAction.STOP_ALL


@pytest.mark.parametrize("status", [EXITED_0, EXITED_3, TERMINATED, KILLED])
def test_what_ends_while_it_serves_is_started_again(status: int) -> None:
    assert on_exit(status, is_stopping=False, is_serving=True) is ExitAction.RESTART


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (EXITED_0, ExitAction.IGNORE),
        (TERMINATED, ExitAction.IGNORE),
        (EXITED_3, ExitAction.REPORT),
        (KILLED, ExitAction.REPORT),
    ],
)
def test_while_stopping_only_a_clean_end_is_silent(status: int, action: ExitAction) -> None:
    assert on_exit(status, is_stopping=True, is_serving=False) is action


def test_an_end_is_told_in_words() -> None:
    assert describe_exit(EXITED_3) == "exited with status 3"
    assert describe_exit(KILLED) == "was killed by SIGKILL"
    assert os.waitstatus_to_exitcode(EXITED_3) == 3
