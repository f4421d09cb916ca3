"""A real NATS server for tests: loopback, a free port of its own, gone at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagemesh.shared.runtime.nats_server import find_nats_server, listen_address, says_ready


class NatsServer:
    """Can be stopped and started again on the same port with what it stored."""

    def __init__(self, store_dir: Path) -> None:
        self._store_dir = store_dir
        self._process: subprocess.Popen[str] | None = None
        self._port = "-1"
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        arguments = ["-a", "127.0.0.1", "-p", self._port, "-js", "-sd", str(self._store_dir)]
        self._process = subprocess.Popen([find_nats_server(), *arguments], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if (address := listen_address(line.rstrip())) is not None:
                self._port = address.rpartition(":")[2]
            if says_ready(line.rstrip()):
                return
        raise AssertionError(f"the NATS server ended with {self._process.wait()}")

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
