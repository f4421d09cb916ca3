"""From the config to what a process shows, asks for and trusts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from stagemesh.shared.config import AuthSection, TlsSection
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.dial import Dial
from stagemesh.shared.rpc.guard import Callers, Listening
from stagemesh.shared.security.client_files import ClientFiles
from stagemesh.shared.security.keys import KeyRing
from stagemesh.shared.security.material import Material, TlsFiles

_log = Log(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Access:
    """Of one process of the mesh. `listening` is for its peers, who show certificates of the mesh; `dial` is how it
    calls them."""

    dial: Dial
    listening: Listening

    @property
    def material(self) -> Material | None:
        return self.dial.material


def mesh_access(tls: TlsSection, log: Log) -> Access:
    """Raises Rejected, naming the key, for files that are wrong."""
    if not tls.is_on:
        return Access(Dial(), Listening())
    material = Material(TlsFiles(Path(tls.cert_file), Path(tls.key_file), Path(tls.ca_file)), log)
    return Access(Dial(material, tls.server_name), Listening(material, clients=True))


def public_listening(tls: TlsSection, log: Log) -> Listening:
    """Of the router: client certificates are asked for only if the config names who signs them."""
    if not tls.is_on:
        return Listening()
    own, client_ca = bool(tls.public_cert_file), tls.public_client_ca_file
    files = TlsFiles(
        Path(tls.public_cert_file if own else tls.cert_file),
        Path(tls.public_key_file if own else tls.key_file),
        Path(client_ca) if client_ca else None,
        "tls.public_" if own else "tls.",
        "tls.public_client_",
    )
    return Listening(Material(files, log), clients=bool(client_ca))


def api_callers(auth: AuthSection, log: Log) -> Callers:
    """Raises Rejected for a keys file that is wrong."""
    return Callers(KeyRing(Path(auth.keys_file), log) if auth.keys_file else None, log)


def router_dial(files: ClientFiles) -> Dial:
    """How a client from outside calls the router. Raises Rejected."""
    return Dial(files.material(_log), api_key=files.api_key())


def peer_dial(files: ClientFiles) -> Dial:
    """How it calls the other processes of a mesh, which want a certificate of the mesh and no API key."""
    return Dial(files.material(_log), files.server_name)
