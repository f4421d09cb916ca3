"""One input against one target, within its limits, and what came of it.

Every input is made by a generator that is seeded with (seed, target, index): a finding is repeated by its index. An
input has CPU_LIMIT_S of CPU time, which is not the host's mood, and MEMORY_LIMIT_BYTES beyond what the process held.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from typing import Final

from stagemesh.shared.errors import Bug, Rejected, StagemeshError

CPU_LIMIT_S: Final = 3.0
HANG_LIMIT_S: Final = 60.0  # of the clock: then it is neither slow nor starved, it stands still
MEMORY_LIMIT_BYTES: Final = 1 << 30

Try = Callable[[Random], None]
"""Makes one input and gives it to the code. Returns if the input is accepted."""


class Outcome(Enum):
    ACCEPTED = "accepted"
    TYPED = "typed error"
    FAILED = "failed"


class TooSlow(BaseException):
    """CPU_LIMIT_S are over. No Exception, so that the code under test cannot take it for one of its own."""


@dataclass(frozen=True, slots=True)
class Target:
    """`open` gets an empty folder of its own. `errors` are those that are true of a wrong input. Of `share`s is made
    how many inputs it gets."""

    name: str
    share: int
    open: Callable[[Path], Try]
    errors: tuple[type[StagemeshError], ...] = (Rejected,)


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is the same for inputs that fail in the same way."""

    target: str
    index: int
    what: str
    details: str


def rng_of(seed: int, target: str, index: int) -> Random:
    return Random(f"{seed}/{target}/{index}")


def judge(target: Target, attempt: Try, seed: int, index: int) -> tuple[Outcome, Finding | None]:
    """Runs one input."""
    faulthandler.dump_traceback_later(HANG_LIMIT_S, exit=True)
    try:
        with _cpu_limit():
            attempt(rng_of(seed, target.name, index))
    except target.errors as error:
        if str(error) and not isinstance(error, Bug):
            return Outcome.TYPED, None
        return Outcome.FAILED, _finding(target, index, error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        return Outcome.FAILED, _finding(target, index, error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome.ACCEPTED, None


def limit_memory() -> None:
    """Of this process, from now on."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))


@contextmanager
def _cpu_limit() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TooSlow(f"over {CPU_LIMIT_S} s of CPU time")

    previous = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)


def _finding(target: Target, index: int, error: BaseException) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/" not in frame.filename] or list(frames)
    where = " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-3:]))
    details = "".join(traceback.format_exception(error))[-4000:]
    return Finding(target.name, index, f"{type(error).__name__} at {where}", details)
