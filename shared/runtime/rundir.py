"""The run dir of a local mesh: private, held by one supervisor at a time, and gone at the end unless it was given."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagemesh.shared.errors import Rejected


@contextmanager
def private_run_dir(wanted: Path | None) -> Iterator[Path]:
    """An absolute directory of mode 0700. Raises Rejected if `wanted` is another user's or in use."""
    if wanted is None:
        path = Path(tempfile.mkdtemp(prefix="stagemesh-"))
        try:
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # a record lock goes with the process that took it: none is stale, and forked children do not have it
    with (path / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Rejected("run_dir", f"{path} is in use by another stagemesh") from None
        yield


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the whole new one. Mode 0600."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(0o600)
    draft.replace(path)
