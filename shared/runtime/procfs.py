"""What the kernel knows of a process that says nothing: whether it works, and whether it was let.

All from /proc, of processes that may end meanwhile: those count as if they had never been.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Work:
    """Of a process and of all that it has started: the seconds in which its threads ran or waited for a core, and the
    bytes that it has read, from files as from the disk itself (what is mapped is not read in the other sense)."""

    active_s: float = 0.0
    read_bytes: int = 0


def waited_s(pid: int) -> float:
    """The seconds that its threads have waited for a core so far, together. 0 where the kernel does not count them."""
    return sum(waiting_ns for _, waiting_ns in _times_ns(pid)) / 1e9


def work_of(group: int) -> Work:
    """Of a process group, by its number: that of its first process."""
    active_ns = read_bytes = 0
    for pid in _members(group):
        active_ns += sum(running_ns + waiting_ns for running_ns, waiting_ns in _times_ns(pid))
        read_bytes += _read_bytes(pid)
    return Work(active_ns / 1e9, read_bytes)


def _times_ns(pid: int) -> Iterator[tuple[int, int]]:
    """(ran, waited for a core) of each of its threads."""
    with suppress(OSError):
        for thread in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError, ValueError):
                running, waiting, _ = (thread / "schedstat").read_text().split()
                yield int(running), int(waiting)


def _members(group: int) -> Iterator[int]:
    for folder in PROC.iterdir():
        with suppress(OSError, ValueError):
            # PID (NAME) STATE PARENT GROUP ...; the name may have blanks and parentheses
            if folder.name.isdecimal() and int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                yield int(folder.name)


def _read_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        lines = (line.partition(": ") for line in (PROC / str(pid) / "io").read_text().splitlines())
        return sum(int(value) for name, _, value in lines if name in ("rchar", "read_bytes"))
    return 0
