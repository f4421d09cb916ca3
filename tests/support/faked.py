"""A mesh of fake services under a real supervisor, and a kill of one of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from tests.support.fake_services import BEHAVIOUR
from tests.support.mesh import LIMIT_S, Mesh, started


def mesh_of(
    tmp_path: Path, timeout_s: float = LIMIT_S, behaviour: str = "", environ: Mapping[str, str] | None = None
) -> AbstractContextManager[Mesh]:
    """`behaviour` is `name=how`, for one of the fakes."""
    name, _, how = behaviour.partition("=")
    faults = {BEHAVIOUR + name: how} if name else {}
    command = ("tests.support.fake_mesh", "{run_dir}", "{ready_file}", str(timeout_s))
    return started(tmp_path, command, {**faults, **(environ or {})})


def kill(mesh: Mesh, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    """The process that has that name now."""
    processes = json.loads(mesh.ready_file.read_text())["processes"]
    (pid,) = [process["pid"] for process in processes if process["name"] == name]
    os.kill(pid, number)
