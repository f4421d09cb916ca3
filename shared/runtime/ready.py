"""What a local mesh tells the outside once it serves: a record for programs and a few lines for people.

The ready file of a supervisor that was killed stays. It names its process by pid and start, so that nobody takes it for
live.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import LOOPBACK
from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.rundir import write_atomically


class ReadyRecord(Struct, frozen=True):
    """What other programs need of a ready file."""

    router: str
    run_dir: str
    pid: int
    pid_started: int

    @property
    def is_live(self) -> bool:
        """Its supervisor runs."""
        return process_start(self.pid) == self.pid_started


def process_start(pid: int) -> int | None:
    """When it was started, in ticks since the boot; None if there is none of that pid. A pid alone comes again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after = stat.rpartition(")")[2].split()
    return None if after[0] in ("Z", "X") else int(after[19])


def read_ready(path: Path) -> ReadyRecord:
    """The record of a mesh that is up. Raises Rejected if there is none at `path`."""
    record = _read(path)
    if not record.is_live:
        raise Rejected("ready_file", f"{path} was left by a stagemesh that is gone (pid {record.pid})")
    return record


def _read(path: Path) -> ReadyRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReadyRecord)
    except OSError as error:
        raise Rejected("ready_file", f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected("ready_file", f"{path} is no ready file of this version: {error}") from None


def _read_any(path: Path) -> ReadyRecord | None:
    """None if it is none of ours: an empty file, perhaps, that was made to be written over."""
    try:
        return _read(path)
    except Rejected:
        return None


class ReadyFile:
    """There while the mesh serves. `path` is None where nobody wants one."""

    def __init__(self, path: Path | None) -> None:
        """Removes what another supervisor has left. Raises Rejected if that one runs."""
        self._path = path
        if path is not None and path.exists():
            record = _read_any(path)
            if record is not None and record.is_live:
                raise Rejected("ready_file", f"{path} is in use by another stagemesh (pid {record.pid})")
            path.unlink()

    def write(self, config: Config, children: Sequence[Child]) -> None:
        if self._path is not None:
            write_atomically(self._path, ready_record(config, children))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def ready_record(config: Config, children: Sequence[Child]) -> str:
    """The JSON of the ready file."""
    by_name = {child.spec.name: child for child in children}
    record = {
        "router": by_name["router"].address,
        "openai": by_name["openai"].address if "openai" in by_name else None,
        "broker": by_name["broker"].address,
        "nats": config.nats.url,
        "nats_credentials": config.nats.credentials_dir,
        "mesh": config.mesh.name,
        "run_dir": config.mesh.run_dir,
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
        "processes": [_process(child) for child in children],
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"


def _process(child: Child) -> dict[str, object]:
    spec = child.spec
    return {
        "name": spec.name,
        "service": spec.service,
        "instance": spec.instance,
        "pp_rank": spec.pp_rank,
        "pid": child.pid,
        "address": child.address,
        "metrics": child.metrics or None,
    }


def ready_text(config: Config) -> str:
    """For a config whose addresses are known."""
    router, port = config.router.listen, config.openai.port
    layout = ", ".join(f"{instance.name} (pp {instance.pp_size})" for instance in config.instances)
    lines = [
        f"stagemesh serves {config.model.path} at {router} (gRPC): {layout}",
        f'  try:  stagemesh generate --router {router} --chat "What is the capital of France?"',
        f"  stop: Ctrl-C, or kill -TERM {os.getpid()}; its run dir is {config.mesh.run_dir}",
    ]
    if port is not None:
        lines.insert(1, f"  OpenAI clients: http://{LOOPBACK}:{port}/v1, model {config.model.served_name}")
    return "\n".join(lines)
