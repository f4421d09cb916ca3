"""What files say, read again when they change.

read --files change--> read again --right--> the new version
                          `--wrong, or half written--> the last good one stays, and the log says so once
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log

T = TypeVar("T")
Signature = tuple[tuple[int, int, int], ...]
_OTHERS = 0o007


class Reloaded(Generic[T]):
    """`current` costs a `stat` of each file while nothing changes. It may be called on any thread."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], log: Log) -> None:
        """`read` raises Rejected for files that are wrong; here, at the start, that is passed on."""
        self._paths, self._read, self._log = tuple(paths), read, log
        self._lock = threading.Lock()
        self._seen = signature(self._paths)  # before the reading: what changes under it is seen the next time
        self._value = read()

    def current(self) -> T:
        """The last good version."""
        with self._lock:
            seen = signature(self._paths)
            if seen != self._seen:
                self._seen = seen
                self._take()
            return self._value

    def _take(self) -> None:
        names = ", ".join(str(path) for path in self._paths)
        try:
            self._value = self._read()
        except Rejected as error:
            self._log.warning("changed files are not taken: the last good ones stay", files=names, error=str(error))
        else:
            self._log.info("changed files are taken", files=names)


def signature(paths: Sequence[Path]) -> Signature:
    """Changes with the files. One that is away for a moment is a change too."""
    return tuple(_signature(path) for path in paths)


def _signature(path: Path) -> tuple[int, int, int]:
    try:
        said = path.stat()
    except OSError:
        return (0, 0, 0)
    return (said.st_mtime_ns, said.st_ino, said.st_size)


def read_file(path: Path, field: str) -> bytes:
    """Raises Rejected, naming the key of the config, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Rejected(field, f"cannot read {path}: {error.strerror}") from error


def read_secret(path: Path, field: str) -> bytes:
    """Raises Rejected also for a file that every user of the host may read."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise Rejected(field, f"cannot read {path}: {error.strerror}") from error
    if mode & _OTHERS:
        raise Rejected(field, f"{path} is open to every user (mode {mode & 0o777:04o}); chmod o= {path}")
    return read_file(path, field)
