"""Units run as systemd would run them, without it: their commands, their environment, a notify socket, SIGTERM."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stagemesh.shared.runtime.notify_socket import NotifySocket
from tests.support.mesh import ROOT
from tests.support.units import Unit, install, load_unit

LIMIT_S: Final = 120.0
WATCHDOG_S: Final = 2.0  # instead of the unit's, so that two keep-alives are soon there
PROGRAM: Final = """#!{python}
from stagemesh.shared.cli.main import main
main()
"""


@dataclass(slots=True)
class Running:
    """A unit's main process. `told` is what it has notified, by datagram."""

    unit: Unit
    process: subprocess.Popen[bytes]
    log: Path
    told: list[Mapping[str, str]] = field(default_factory=list)

    def count(self, key: str) -> int:
        return sum(key in lines for lines in self.told)

    def last(self, key: str) -> str:
        return [lines[key] for lines in self.told if key in lines][-1]


class UnitHost:
    """Hosts and starts units. `root` stands for the file system that they are installed in."""

    def __init__(self, root: Path, config: str, secrets: Mapping[str, str], drop_ins: Sequence[str]) -> None:
        self.root, self.running = root, dict[str, Running]()
        install(root, *drop_ins)
        self.program = self._write("opt/stagemesh/bin/stagemesh", PROGRAM.format(python=sys.executable))
        self.program.chmod(0o755)
        self._write("etc/stagemesh/mesh.toml", config)
        for name, text in secrets.items():
            self._write(f"etc/stagemesh/secrets/{name}", text)
        self._notify = NotifySocket(root / "notify.sock")

    def start(self, name: str, on: Sequence[str] = ()) -> Running:
        """`on` goes before the command."""
        unit = load_unit(self.root, name)
        environ = self._environ(unit)
        log = self.root / f"{name}.log"
        with log.open("ab") as output:
            command = [*on, *unit.command("ExecStart", environ)]
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.running[name] = Running(unit, process, log)
        return self.running[name]

    def until(self, key: str, *names: str, times: int = 1) -> None:
        """Returns when each of `names` has notified `key` so often. Fails when one ends before, or at the limit."""
        deadline = time.monotonic() + LIMIT_S
        self._receive()
        while late := [name for name in names if self.running[name].count(key) < times]:
            ended = [name for name in late if self.running[name].process.poll() is not None]
            assert not ended, self.said(ended)
            readable, _, _ = select.select([self._notify], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"no {key} of {late}: {self.said(late)}"
            self._receive()

    def terminate(self, *names: str) -> None:
        for name in names:
            self.running[name].process.send_signal(signal.SIGTERM)

    def wait(self, *names: str) -> None:
        """Returns when each has ended well, within its unit's time to stop and what it asked for beyond."""
        for name in names:
            running = self.running[name]
            extension_s = int(running.last("EXTEND_TIMEOUT_USEC")) / 1e6
            code = running.process.wait(max(running.unit.seconds("TimeoutStopSec"), extension_s))
            assert code == 0, self.said([name])

    def said(self, names: list[str]) -> str:
        tails = {name: self.running[name].log.read_text(errors="replace")[-3000:] for name in names}
        return "\n".join(f"-- {name}\n{tail}" for name, tail in tails.items())

    def close(self) -> None:
        for running in self.running.values():
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()
        self._notify.close()

    def _environ(self, unit: Unit) -> dict[str, str]:
        assert unit.seconds("WatchdogSec") > 0
        marks = {key: value for key, value in os.environ.items() if key == "STAGEMESH_TEST_MARK"}
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root / "var/lib/stagemesh"),
            **({} if self.program.is_symlink() else {"PYTHONPATH": str(ROOT / ".ns")}),  # an installed one needs none
            **marks,
            **unit.environment,
            "NOTIFY_SOCKET": str(self._notify.path),
            "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6)),
            "CREDENTIALS_DIRECTORY": str(self._credentials(unit)),
        }

    def _credentials(self, unit: Unit) -> Path:
        """A directory for this unit alone."""
        folder = self.root / "run/credentials" / unit.name
        folder.mkdir(parents=True, exist_ok=True)
        for credential in unit.values.get("LoadCredential", []):
            name, _, source = credential.partition(":")
            shutil.copy(self.root / source.lstrip("/"), folder / name)
            (folder / name).chmod(0o400)
        name, _, text = unit.value("SetCredential").partition(":")
        (folder / name).write_text(text)
        return folder

    def _receive(self) -> None:
        by_pid = {running.process.pid: running for running in self.running.values()}
        while (received := self._notify.receive()) is not None:
            pid, lines = received
            if pid in by_pid:
                by_pid[pid].told.append(lines)

    def _write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


@contextmanager
def unit_host(
    root: Path, config: str, secrets: Mapping[str, str] | None = None, drop_ins: Sequence[str] = ()
) -> Iterator[UnitHost]:
    """`secrets` are files by name. Nothing of it runs at the end."""
    with ExitStack() as stack:
        host = UnitHost(root, config, secrets or {}, drop_ins)
        stack.callback(host.close)
        yield host


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
