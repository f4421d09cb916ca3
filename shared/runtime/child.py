"""A child process of the supervisor: forked, tied to its parent's life, its output read line by line.

forked --READY=1--> ready --exit, reaped--> over
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from stagemesh.shared.runtime.exits import report_failure
from stagemesh.shared.runtime.notify import ADDRESS, CUT_OFF, EPOCH, METRICS
from stagemesh.shared.runtime.plan import ProcessSpec
from stagemesh.shared.runtime.signals import WATCHED

TAIL_LINES: Final = 50
MAX_LINE_BYTES: Final = 1 << 16
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_READ_BYTES: Final = 1 << 16


class Child:
    """What the supervisor knows of one process."""

    def __init__(self, spec: ProcessSpec, pid: int, output_fd: int) -> None:
        self.spec = spec
        self.pid = pid
        self.output_fd: int | None = output_fd
        self.is_ready = False
        self.status = "starting"
        self.address = spec.address
        self.epoch = 0  # of its instance, once it has said so
        self.metrics = ""  # where they can be read, once it has said so
        self.wait_status: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = b""

    @property
    def is_alive(self) -> bool:
        """Not reaped yet."""
        return self.wait_status is None

    @property
    def has_cut_off(self) -> bool:
        """It did not drain in time; `status` says what was left."""
        return self.status.startswith(CUT_OFF)

    def hear(self, lines: Mapping[str, str]) -> Iterator[str]:
        """Takes in what it says of itself; gives what is worth telling people."""
        self.address = lines.get(ADDRESS, self.address)
        self.metrics = lines.get(METRICS, self.metrics)
        self.epoch = int(lines.get(EPOCH, self.epoch))
        status = lines.get("STATUS", self.status)
        if status != self.status and not self.is_ready and "READY" not in lines:
            yield f"{self.spec.name}: {status}"
        self.status = status
        if lines.get("READY") == "1" and not self.is_ready:
            self.is_ready = True
            yield f"{self.spec.name} is ready"

    def read_lines(self) -> list[str]:
        """The whole lines that can be read now without waiting; the last one too, once the pipe is at its end."""
        lines: list[str] = []
        while self.output_fd is not None:
            try:
                data = os.read(self.output_fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.close()
            lines += self._split(data)
        self.tail.extend(lines)
        return lines

    def close(self) -> None:
        """Closes our end of its output."""
        if self.output_fd is not None:
            os.close(self.output_fd)
            self.output_fd = None

    def reap(self) -> bool:
        """True if it has ended, now or before. What it started and left behind is killed."""
        if self.wait_status is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # before it is reaped: its number is still its own
            self.wait_status = os.waitpid(self.pid, 0)[1]
        return True

    def send(self, number: signal.Signals) -> None:
        """SIGKILL goes to its whole process group, so nothing that it started is left."""
        if not self.is_alive:
            return
        try:
            (os.killpg if number is signal.SIGKILL else os.kill)(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)  # not reaped, so it is there; its group was not made yet

    def _split(self, data: bytes) -> list[str]:
        *whole, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (not data or len(self._partial) > MAX_LINE_BYTES):
            whole, self._partial = [*whole, self._partial], b""
        return [line.decode(errors="replace") for line in whole]


def fork_child(
    spec: ProcessSpec, run: Callable[[], None], *, environ: Mapping[str, str], close_fds: Iterable[int]
) -> Child:
    """Forks a process that calls `run` and exits; it dies with this one, whatever this one dies of.

    Call it from the only thread. `close_fds` are the parent's descriptors, which the child must not keep open.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_fd, write_fd = os.pipe()
    parent = os.getpid()
    # until the child has its own handlers, a signal would reach the parent's through the shared wakeup descriptor
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        pid = os.fork()
        if pid == 0:
            # a descriptor that is named twice can be closed once
            _run_and_exit(spec, run, environ, parent, write_fd, {read_fd, *close_fds}, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    return Child(spec, pid, read_fd)


def _run_and_exit(
    spec: ProcessSpec,
    run: Callable[[], None],
    environ: Mapping[str, str],
    parent: int,
    output_fd: int,
    close_fds: Iterable[int],
    mask: Iterable[int],
) -> None:
    """In the child. Never returns: the parent's stack and its exit handlers are not the child's to unwind."""
    code = 1
    try:
        _detach(spec.name, parent, output_fd, close_fds)
        os.environ.update(environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:
        code = report_failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _detach(name: str, parent: int, output_fd: int, close_fds: Iterable[int]) -> None:
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the supervisor, which stops us in order
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))
    signal.set_wakeup_fd(-1)
    for number in WATCHED:
        signal.signal(number, signal.SIG_DFL)
    for fd in close_fds:
        os.close(fd)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null_fd, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(source, target)
    os.close(null_fd)
    os.close(output_fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _prctl(option: int, value: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
