"""What a process does before it is ready, as decisions without processes; and what the kernel tells of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stagemesh.shared.runtime.procfs import Work, waited_s, work_of
from stagemesh.shared.runtime.starting import BUSY, BUSY_BYTES, LOOKS, Starting

QUIET_S, SILENT_S = 12.0, 60.0
LOOK_S = QUIET_S / LOOKS


class Worker:
    """What the kernel would tell of the only process, 1."""

    def __init__(self) -> None:
        self.done = Work(5.0, 1 << 20)
        self.starting = Starting(QUIET_S, SILENT_S, lambda pid: self.done)

    def look(self, now_s: float) -> dict[int, str]:
        return self.starting.overdue(now_s, [1])

    def until_overdue(self, active: float = 0.0, read_bytes: int = 0) -> float:
        """When it is, if it does so much from look to look."""
        now_s = 0.0
        while not self.look(now_s):
            now_s += LOOK_S
            self.done = Work(self.done.active_s + active * LOOK_S, self.done.read_bytes + read_bytes)
        return now_s


def test_who_does_nothing_is_overdue_once() -> None:
    worker = Worker()
    assert worker.until_overdue() == QUIET_S
    assert worker.look(QUIET_S + LOOK_S) == {}


def test_threads_that_only_wait_do_nothing() -> None:
    assert Worker().until_overdue(active=BUSY / 2, read_bytes=100) == QUIET_S


@pytest.mark.parametrize(("active", "read_bytes"), [(2 * BUSY, 0), (0.0, BUSY_BYTES)])
def test_who_works_or_reads_has_as_long_as_a_start_may_take(active: float, read_bytes: int) -> None:
    assert Worker().until_overdue(active, read_bytes) == SILENT_S


def test_who_says_something_has_the_time_again() -> None:
    worker = Worker()
    for now in range(200):
        if now % 10 == 0:
            worker.starting.heard(1, float(now))
        assert worker.look(float(now)) == {}
    assert worker.look(190 + QUIET_S) == {1: "has done nothing for 12 s"}


def test_it_says_when_to_look_again() -> None:
    worker = Worker()
    worker.look(100.0)
    assert worker.starting.deadline_s == 100.0 + LOOK_S
    worker.starting.overdue(101.0, [])
    assert worker.starting.deadline_s is None


@contextmanager
def running(code: str) -> Iterator[int]:
    """A process in a group of its own, which has written a line."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdout.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


STARTS_ONE = "import subprocess, sys; subprocess.run([sys.executable, '-c', '''{}'''])"
SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import time; print(flush=True); time.sleep(600)"


@pytest.mark.parametrize("code", [SPIN, STARTS_ONE.format(SPIN)])
def test_what_a_process_or_its_child_does_is_seen(code: str) -> None:
    with running(code) as pid:
        before = work_of(pid).active_s
        while work_of(pid).active_s < before + 0.1:
            pass


def test_one_that_sleeps_does_nothing() -> None:
    with running(SLEEP) as pid, running(SPIN) as busy:
        spun, before = work_of(busy).active_s, work_of(pid)
        while work_of(busy).active_s < spun + 0.2:
            pass
        after = work_of(pid)
        assert after.active_s - before.active_s < 0.1
        assert after.read_bytes == before.read_bytes > 0


def test_what_waits_for_a_core_is_counted() -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, [{core}])\n{SPIN}"
    with running(pinned) as one, running(pinned) as other:
        before = waited_s(one), waited_s(other)
        while waited_s(one) < before[0] + 0.1 or waited_s(other) < before[1] + 0.1:
            pass


def test_one_that_is_gone_has_done_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    process.wait()
    assert (work_of(process.pid), waited_s(process.pid)) == (Work(), 0.0)
