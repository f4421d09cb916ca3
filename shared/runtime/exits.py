"""How a process ended: in words, as an exit code, and what its supervisor does about it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from enum import Enum

from stagemesh.shared.errors import StagemeshError

EXIT_FAILED = 1
EXIT_REFUSED = 2


class ExitAction(Enum):
    IGNORE = "ignore"
    REPORT = "report"
    RESTART = "restart"
    STOP_ALL = "stop all"


def on_exit(wait_status: int, *, is_stopping: bool, is_serving: bool) -> ExitAction:
    """What to do when a process has ended. Pure.

    What dies once all has been ready is started again. While stopping, one that was still starting may die of our
    SIGTERM; what else is not 0 did not drain.
    """
    if not is_stopping:
        return ExitAction.RESTART if is_serving else ExitAction.STOP_ALL
    gone_as_asked = os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGTERM
    return ExitAction.IGNORE if wait_status == 0 or gone_as_asked else ExitAction.REPORT


def describe_exit(wait_status: int) -> str:
    """`exited with status 3` or `was killed by SIGKILL`."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        known = {member.value: member.name for member in signal.Signals}
        return f"was killed by {known.get(number, f'signal {number}')}"
    return f"exited with status {os.waitstatus_to_exitcode(wait_status)}"


def report_failure(error: BaseException) -> int:
    """Writes why this process ends to stderr and returns its exit code: a line for what we raise on purpose, a
    traceback for the rest."""
    code = EXIT_REFUSED
    for leaf in _leaves(error):
        if isinstance(leaf, StagemeshError):
            print(f"error: {leaf}", file=sys.stderr)
        else:
            traceback.print_exception(leaf)
            code = EXIT_FAILED
    return code


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in error.exceptions:
            yield from _leaves(child)
    else:
        yield error
