"""Stopped children of a real kernel, on a clock of the test's own."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.options import Limits
from stagemesh.shared.runtime.plan import ProcessSpec
from stagemesh.shared.runtime.watch import Stuck, Watch

LIMITS = Limits(stopped_s=2.0)


def sleep() -> None:
    signal.sigwait({signal.SIGUSR1})


class Watched:
    """Two children that do nothing, and are ready."""

    def __init__(self, stack: ExitStack) -> None:
        self.children = Children()
        stack.callback(self.children.kill_all)
        for rank in (0, 1):
            spec = ProcessSpec(f"decode-0/{rank}", "decode", "decode-0", rank, "")
            self.children.fork(spec, sleep, {}, []).is_ready = True
        self.watch = Watch(self.children, stack.enter_context(selectors.PollSelector()), LIMITS)
        stack.callback(self.watch.close)

    def stop(self, rank: int) -> None:
        self._send(rank, signal.SIGSTOP, os.WSTOPPED)

    def resume(self, rank: int) -> None:
        self._send(rank, signal.SIGCONT, os.WCONTINUED)

    def _send(self, rank: int, number: signal.Signals, event: int) -> None:
        pid = self.children[f"decode-0/{rank}"].pid
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, event | os.WNOWAIT)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(stack)


STUCK = [Stuck("decode-0/0", "is stopped")]


def test_who_is_stopped_for_so_long_is_stuck_once(watched: Watched) -> None:
    assert watched.watch.look(10.0, ()) == []
    watched.stop(0)
    assert watched.watch.look(11.0, ()) == []
    assert watched.watch.deadline_s() == 13.0
    assert watched.watch.look(13.0, ()) == STUCK
    assert watched.watch.look(13.1, ()) == []


def test_who_goes_on_in_between_is_not_stuck(watched: Watched) -> None:
    watched.watch.look(10.0, ())
    for now_s in (10.0, 11.5, 13.0, 14.5):
        watched.stop(0)
        assert watched.watch.look(now_s, ()) == [], "each time it had gone on before, unseen"
        watched.resume(0)
    assert watched.watch.look(16.0, ()) == []
    assert watched.watch.stopped_deadline_s is None


def test_in_a_group_that_falls_nobody_waits_for_who_is_stopped(watched: Watched) -> None:
    watched.watch.look(10.0, ())
    watched.stop(0)
    assert watched.watch.look(10.1, {"prefill-0"}) == []
    assert watched.watch.look(10.2, {"decode-0"}) == STUCK
    assert watched.watch.look(10.3, {"decode-0"}) == []


def test_a_watcher_that_was_stopped_with_them_blames_nobody(watched: Watched) -> None:
    watched.watch.look(10.0, ())
    watched.stop(0)
    watched.watch.look(10.0, ())
    assert watched.watch.look(100.0, ()) == []
    watched.resume(0)
    assert watched.watch.look(100.1, ()) == []
