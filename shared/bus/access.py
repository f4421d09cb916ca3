"""How a process signs on to NATS: as the user of its role, with TLS where the server's address asks for it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.bus.roles import inbox_of
from stagemesh.shared.config import NatsSection
from stagemesh.shared.errors import Rejected
from stagemesh.shared.security.material import Material, fill_context
from stagemesh.shared.security.reloaded import read_secret

FIELD: Final = "nats.credentials_dir"


@dataclass(frozen=True, slots=True)
class BusAccess:
    """Without `password_file` nobody is asked; without `material` a tls:// server is trusted as the host trusts. Both
    are read again for each connection."""

    role: str = ""
    password_file: Path | None = None
    material: Material | None = None
    server_name: str = ""

    def options(self, url: str) -> dict[str, Any]:
        """For the library's `connect`."""
        options: dict[str, Any] = {}
        if self.role:
            options["inbox_prefix"] = inbox_of(self.role)
        if self.password_file is not None:
            options |= {"user": self.role, "password": _reader(self.password_file)}
        if url.startswith("tls://"):
            # TLS before a word is said: else whoever stands between could say that none is wanted, and hear the
            # password
            options |= {"tls": self.context(), "tls_handshake_first": True}
            if self.server_name:
                options["tls_hostname"] = self.server_name
        return options

    def context(self) -> ssl.SSLContext:
        """With the certificates of now. Raises Rejected for files that are wrong."""
        if self.material is None:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        fill_context(context, self.material.files)
        return context


NOBODY: Final = BusAccess()


def bus_access(nats: NatsSection, role: str, material: Material | None, server_name: str = "") -> BusAccess:
    """Of a process of that role. Raises Rejected if its password cannot be read."""
    path = Path(nats.credentials_dir) / role if nats.credentials_dir else None
    if path is not None:
        read_password(path)
    return BusAccess(role, path, material, server_name)


def read_password(path: Path) -> str:
    """Raises Rejected, which does not quote it."""
    word = read_secret(path, FIELD).decode(errors="replace").strip()
    if not word or not word.isprintable():
        raise Rejected(FIELD, f"{path} must have a password in one line")
    return word


def _reader(path: Path) -> Callable[[], str]:
    return lambda: read_password(path)
