"""A real NATS server for tests: loopback, a free port of its own, gone at the end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagemesh.shared.runtime.nats_server import find_nats_server, listen_address, says_ready


class NatsServer:
    """Can be stopped and started again on the same port with what it stored."""

    def __init__(self, store_dir: Path, config_file: Path | None = None) -> None:
        """`config_file` says where it stores, if it is given."""
        self._store_dir, self._config_file = store_dir, config_file
        self._process: subprocess.Popen[str] | None = None
        self._port = "-1"
        self.start()

    @property
    def url(self) -> str:
        return f"nats://{self.address}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        file, store = self._config_file, str(self._store_dir)
        config = ["-js", "-sd", store] if file is None else ["-c", str(file)]
        arguments = [*config, "-a", "127.0.0.1", "-p", self._port]
        self._process = subprocess.Popen([find_nats_server(), *arguments], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if (address := listen_address(line.rstrip())) is not None:
                self._port = address.rpartition(":")[2]
            if says_ready(line.rstrip()):
                return
        self.stop()
        raise AssertionError(f"the NATS server has ended: {said}")

    def reload(self) -> None:
        """Returns when it has read its config again."""
        assert self._process is not None
        assert self._process.stderr is not None
        self._process.send_signal(signal.SIGHUP)
        assert any("Reloaded server configuration" in line for line in self._process.stderr)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def nats_server(store_dir: Path) -> Iterator[NatsServer]:
    server = NatsServer(store_dir)
    try:
        yield server
    finally:
        server.stop()
