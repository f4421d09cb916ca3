"""Signals as readable bytes, for a loop that waits in `select`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED: Final = (*STOP_SIGNALS, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class SignalPipe:
    """`read_fd` becomes readable when a watched signal arrives. Both ends are closed in a forked child."""

    read_fd: int
    write_fd: int

    def fileno(self) -> int:
        return self.read_fd

    def receive(self) -> list[signal.Signals]:
        """Those that arrived since the last call, in order."""
        try:
            return [signal.Signals(number) for number in os.read(self.read_fd, 4096)]
        except BlockingIOError:
            return []


@contextmanager
def watched_signals() -> Iterator[SignalPipe]:
    """Watches the stop signals and SIGCHLD; at the end everything is as it was before. For the main thread."""
    pipe = SignalPipe(*os.pipe())
    for fd in (pipe.read_fd, pipe.write_fd):
        os.set_blocking(fd, False)
    before = {number: signal.signal(number, lambda *_: None) for number in WATCHED}
    previous_fd = signal.set_wakeup_fd(pipe.write_fd, warn_on_full_buffer=False)
    try:
        yield pipe
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(pipe.read_fd)
        os.close(pipe.write_fd)
