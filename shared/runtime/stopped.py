"""Children that a signal has stopped: what the kernel tells their parent of it."""

from __future__ import annotations

import os
from collections.abc import Iterator


def stops(pid: int) -> Iterator[bool]:
    """Whether a signal has stopped our child (True) or let it go on: what has happened since the last call, in order.
    Of what came and went meanwhile the kernel keeps the last. Nothing of one that has ended."""
    try:
        while event := os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG):
            yield event.si_code == os.CLD_STOPPED
    except ChildProcessError:
        return
