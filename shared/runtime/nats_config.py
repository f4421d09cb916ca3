"""What the NATS server of a local mesh is configured with, beyond its arguments: TLS, and a user for each role."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stagemesh.shared.bus.access import read_password
from stagemesh.shared.bus.roles import ROLES, render_roles
from stagemesh.shared.config import Config, TlsSection
from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.nats_server import find_nats_server, run_nats_server
from stagemesh.shared.runtime.rundir import write_atomically
from stagemesh.shared.security.reloaded import Signature, signature

CHECK_S: Final = 2.0  # between looks at the files


class NatsFiles:
    """The config file of the server, if it needs one, and the files that it is made of."""

    def __init__(self, config: Config) -> None:
        self._config, self._seen = config, self._signature(config)

    def server(self, port: str) -> Callable[[], None]:
        """What becomes the server, on `port` or, for -1, any free one. Raises Rejected."""
        binary, file = find_nats_server(), self.write()
        store = Path(self._config.mesh.run_dir) / "nats"
        return lambda: run_nats_server(binary, store, self._config.mesh.name, port, file)

    def write(self) -> Path | None:
        """In the run dir, for this user only: it has the passwords. Raises Rejected if one cannot be read, Retryable if
        the file cannot be written."""
        tls, folder = self._config.tls, self._config.nats.credentials_dir
        blocks = [_tls_block(tls)] if tls.is_on else []
        if folder:
            blocks.append(render_roles({role: read_password(Path(folder) / role) for role in ROLES}))
        path = Path(self._config.mesh.run_dir) / "nats.conf"
        text = "\n".join(blocks)
        if blocks and not (path.exists() and path.read_text() == text):  # a server comes back on a full disk, too
            write_atomically(path, text)
        return path if blocks else None

    def url(self, address: str) -> str:
        return f"{'tls' if self._config.tls.is_on else 'nats'}://{address}"

    def deadline(self, now: float) -> float | None:
        """When to look whether the files have changed; never where there are none."""
        return now + CHECK_S if self._seen else None

    def look(self, server: Child | None) -> None:
        """Files that have changed are read again by the server. Its connections stay."""
        seen = self._signature(self._config)
        if seen != self._seen and server is not None:
            server.send(signal.SIGHUP)
        self._seen = seen

    @staticmethod
    def _signature(config: Config) -> Signature:
        tls = config.tls
        return signature([Path(path) for path in (tls.cert_file, tls.key_file, tls.ca_file) if path])


def _tls_block(tls: TlsSection) -> str:
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    lines = "".join(f"  {key}: {json.dumps(path)}\n" for key, path in files.items())
    return f"tls {{\n{lines}  verify: true\n  handshake_first: auto\n}}\n"
