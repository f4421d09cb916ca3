"""What `stagemesh up` is told, and what its children inherit."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from stagemesh.shared.config import Config
from stagemesh.shared.runtime.plan import ENTRIES
from stagemesh.shared.runtime.silence import LOST_AFTER_S
from stagemesh.shared.runtime.starting import QUIET_S


@dataclass(frozen=True, slots=True)
class Limits:
    """A child is killed that is stopped for `stopped_s`, by when it is lost to its peers anyhow; that has shown no
    progress for `watchdog_s`, in which it could have had a core; that before it is ready does nothing for `quiet_s`, or
    says nothing for `start_s`, whatever it does."""

    stopped_s: float = LOST_AFTER_S
    watchdog_s: float = 8.0
    quiet_s: float = QUIET_S
    start_s: float = 180.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    """`preload` are modules imported once, before forking, if they are installed. `child_environ` is added to every
    child's environment. All are ready within `startup_timeout_s`, or the mesh is taken down.
    `reaped` is called, in a process of its own, with an instance and an epoch all of whose processes are reaped; empty:
    nobody needs to know."""

    config: Config
    ready_file: Path | None = None
    startup_timeout_s: float = 180.0
    entries: Mapping[str, str] = field(default_factory=lambda: ENTRIES)
    preload: tuple[str, ...] = ("torch",)
    child_environ: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    reaped: str = "stagemesh.shared.stage.reaped:run"


def preload(names: tuple[str, ...]) -> None:
    """Imports what children are to inherit."""
    # a pool of numpy's threads would not survive the fork, and no service needs one
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in names:
        if find_spec(name) is not None:
            import_module(name)
    gc.collect()
    gc.freeze()  # or a collection in a child would copy every page of what it inherited
