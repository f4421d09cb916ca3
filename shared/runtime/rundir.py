"""The run dir of a local mesh: private, held by one supervisor at a time, and gone at the end unless it was given."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stagemesh.shared.errors import Rejected, Retryable


@contextmanager
def private_run_dir(wanted: Path | None) -> Iterator[Path]:
    """An absolute directory of mode 0700. Raises Rejected if `wanted` is another user's, in use or cannot be made."""
    if wanted is None:
        path = _temporary()
        try:
            with _locked(path):  # its name is told to the user, who may give it to a second one
                yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return
    path = wanted.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.geteuid():
            raise Rejected("run_dir", f"{path} belongs to another user")
        path.chmod(0o700)
    except OSError as error:
        raise Rejected("run_dir", f"cannot use {path}: {error.strerror}") from error
    with _locked(path):
        yield path


def _temporary() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="stagemesh-"))
    except OSError as error:
        raise Rejected("run_dir", f"cannot make a temporary one: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # a record lock goes with the process that took it: none is stale, and forked children do not have it
    try:
        lock = (path / "lock").open("w")
    except OSError as error:
        raise Rejected("run_dir", f"cannot use {path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Rejected("run_dir", f"{path} is in use by another stagemesh") from None
        yield


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the whole new one. Mode 0600. Raises Retryable if it cannot be written: on a full
    disk, say. Then there is what was there before, and no draft."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.touch(mode=0o600)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise Retryable(f"{path} cannot be written: {error.strerror}") from error
