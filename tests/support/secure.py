"""A mesh as a deployment over several hosts has it, on loopback: TCP with TLS, API keys, users on NATS."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stagemesh.shared.bus.access import BusAccess, read_password
from stagemesh.shared.bus.roles import ROLES
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.dial import Dial
from stagemesh.shared.security.keys import make_key
from stagemesh.shared.security.material import Material, TlsFiles
from tests.support.certificates import Authority, Issued, write_files
from tests.support.mesh import ROOT
from tests.support.running import RunningMesh, running_mesh

LOG = Log(logging.getLogger("stagemesh.test"))
TIMEOUT_S = 30.0


def free_ports(count: int) -> list[int]:
    """Free a moment ago, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(slots=True)
class SecureMesh:
    """`keys` are API keys by client. The mesh's own files lie in `folder` as mesh.pem, mesh.key and mesh-ca.pem."""

    folder: Path
    model: Path
    authority: Authority = field(default_factory=lambda: Authority("mesh"))
    keys: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: free_ports(4))

    def __post_init__(self) -> None:
        self.write_mesh(self.authority.issue("mesh"), self.authority.pem)
        self.write_keys("alice", "bob")
        command = [sys.executable, "-m", "stagemesh.shared.cli.main", "keys", "nats", str(self.passwords)]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=60)
        self.config_file.write_text(self._config())

    def write_mesh(self, issued: Issued, ca_pem: bytes) -> None:
        write_files(self.folder, issued, ca_pem)

    def write_keys(self, *names: str) -> None:
        """New keys for those, and no others."""
        made = {name: make_key(name) for name in names}
        self.keys = {name: key for name, (key, _) in made.items()}
        draft = self.folder / "keys.new"
        draft.write_text("".join(f"{line}\n" for _, line in made.values()))
        draft.chmod(0o600)
        draft.replace(self.folder / "keys")

    @property
    def config_file(self) -> Path:
        return self.folder / "mesh.toml"

    @property
    def passwords(self) -> Path:
        return self.folder / "nats"

    @property
    def ca_file(self) -> Path:
        return self.folder / "mesh-ca.pem"

    @property
    def broker(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def stages(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports[1:]]

    @property
    def secrets(self) -> list[str]:
        """What nobody may ever see: of keys the part behind the name, of a private key its lines."""
        key_lines = (self.folder / "mesh.key").read_text().splitlines()[1:-1]
        passwords = [read_password(self.passwords / role) for role in ROLES]
        return [*(key.partition(".")[2] for key in self.keys.values()), *passwords, *key_lines]

    def client(self, name: str = "alice") -> Dial:
        """How a client from outside calls."""
        return Dial(Material(TlsFiles(None, None, self.ca_file), LOG), api_key=self.keys[name])

    def peer(self, name: str = "mesh") -> Dial:
        """How a process of the mesh calls; another name is a certificate that a test has written beside it."""
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.folder / f"{name}-ca.pem")
        return Dial(Material(files, LOG))

    def bus(self, role: str) -> BusAccess:
        return BusAccess(role, self.passwords / role, self.peer().material)

    def _config(self) -> str:
        files = {key: f'"{self.folder}/mesh{end}"' for key, end in _FILES.items()}
        tls = "".join(f"{key} = {path}\n" for key, path in files.items())
        prefill, decode = self.stages[:2], self.stages[2:]
        return (
            f'[mesh]\nrun_dir = "{self.folder}/run"\n[broker]\nlisten = "{self.broker}"\n'
            f'[model]\npath = "{self.model}"\ndtype = "float64"\n'
            f"[engine]\npage_size = 8\nchunk_size = 32\nnum_pages = 256\n"
            f'[tls]\n{tls}[auth]\nkeys_file = "{self.folder}/keys"\n[nats]\ncredentials_dir = "{self.passwords}"\n'
            f'[[instance]]\nname = "prefill-0"\nrole = "prefill"\npp_size = 2\nstages = {_toml(prefill)}\n'
            f'[[instance]]\nname = "decode-0"\nrole = "decode"\npp_size = 1\nstages = {_toml(decode)}\n'
        )

    @contextmanager
    def running(self) -> Iterator[RunningMesh]:
        options = ("--startup-timeout", "60", "--config", str(self.config_file))
        with running_mesh(self.folder, *options, router_dial=self.client(), peer_dial=self.peer()) as mesh:
            yield mesh


_FILES = {"cert_file": ".pem", "key_file": ".key", "ca_file": "-ca.pem"}


def _toml(addresses: list[str]) -> str:
    return "[" + ", ".join(f'"{address}"' for address in addresses) + "]"


def shown_certificate(address: str, files: TlsFiles) -> bytes:
    """What a server shows to a new connection, as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown).encode()
