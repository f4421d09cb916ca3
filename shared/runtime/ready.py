"""What a local mesh tells the outside once it serves: a record for programs and a few lines for people.

The ready file of a supervisor that was killed stays. It names its process by pid and start, so that nobody takes it for
live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import LOOPBACK
from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.rundir import write_atomically

AGAIN_S: Final = 1.0
"""Between tries to write it."""


class ReadyRecord(Struct, frozen=True):
    """What other programs need of a ready file."""

    router: str
    nats: str
    nats_credentials: str
    mesh: str
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


class ReadyFile:
    """There while the mesh serves. `path` is None where nobody wants one; `report` is told what goes wrong with it."""

    def __init__(self, path: Path | None, report: Callable[[str], None]) -> None:
        """Removes what another supervisor has left. Raises Rejected if that one runs, if something else is there, or if
        nothing can be written there."""
        self._path, self._report = path, report
        self._unwritten: str | None = None
        self.deadline_s: float | None = None
        """When `look` tries again what could not be written."""
        if path is not None:
            _make_way(path)

    def write(self, config: Config, children: Sequence[Child]) -> None:
        """The first time. Raises Retryable: who waits for it would wait in vain."""
        if self._path is not None:
            write_atomically(self._path, ready_record(config, children))

    def renew(self, config: Config, children: Sequence[Child], now_s: float) -> None:
        """A mesh that serves does not end because its file cannot be written: it has the last record until it can."""
        self._unwritten = ready_record(config, children)
        self._try(now_s)

    def look(self, now_s: float) -> None:
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self._try(now_s)

    def remove(self) -> None:
        if self._path is not None:
            with suppress(OSError):  # it names a process that is gone
                self._path.unlink(missing_ok=True)

    def _try(self, now_s: float) -> None:
        assert self._unwritten is not None
        try:
            if self._path is not None:
                write_atomically(self._path, self._unwritten)
        except Retryable as error:
            if self.deadline_s is None:
                self._report(f"ready_file: {error}; until it can be, it has addresses and pids of before")
            self.deadline_s = now_s + AGAIN_S
        else:
            self._unwritten = self.deadline_s = None


def _make_way(path: Path) -> None:
    """Nothing is at `path`, and something can be. Raises Rejected."""
    try:
        if path.exists() and not path.is_file():
            raise Rejected("ready_file", f"{path} is no plain file")
        if path.exists() and path.stat().st_size:  # an empty one was made to be written over
            record = _read(path)
            if record.is_live:
                raise Rejected("ready_file", f"{path} is in use by another stagemesh (pid {record.pid})")
        write_atomically(path, "")
        path.unlink()
    except (OSError, Retryable) as error:
        raise Rejected("ready_file", str(error)) from None


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
        f'  try:  stagemesh {_access(config)}generate --router {router} --chat "What is the capital of France?"',
        f"  stop: Ctrl-C, or kill -TERM {os.getpid()}; its run dir is {config.mesh.run_dir}",
    ]
    if port is not None:
        lines.insert(1, f"  OpenAI clients: http://{LOOPBACK}:{port}/v1, model {config.model.served_name}")
    return "\n".join(lines)


def _access(config: Config) -> str:
    """The options that a client of that router needs, as far as the config tells."""
    tls, options = config.tls, ""
    if tls.is_on:
        options += f"--ca-file {'CA' if tls.public_cert_file else tls.ca_file} "
    if tls.public_client_ca_file:
        options += "--cert-file CERT --key-file KEY "
    return f"{options}--api-key-file KEYFILE " if config.auth.keys_file else options
