"""Whether the files of certificates, keys and passwords that a config names are there and are right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from stagemesh.shared.bus.access import read_password
from stagemesh.shared.bus.roles import ROLES
from stagemesh.shared.config import Config
from stagemesh.shared.config.paths import CREDENTIAL
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.access import api_callers, mesh_access, public_listening

UNSEEN: Final = "credentials of a unit, which only it can read"


def look_at_secrets(config: Config, here: Collection[str]) -> Iterator[tuple[str, str, bool]]:
    """(key of the config, what was seen, whether it is right) of each that processes on this host read; `here` are the
    fields of the addresses that are this host's."""
    log, tls = Log(logging.getLogger(__name__)), config.tls
    if tls.is_on:
        files = (tls.cert_file, tls.key_file, tls.ca_file)
        yield _seen("tls", files, lambda: mesh_access(tls, log))
    if "router.listen" not in here:
        return
    public = (tls.public_cert_file, tls.public_key_file, tls.public_client_ca_file)
    if any(public):
        yield _seen("tls.public", public, lambda: public_listening(tls, log))
    if config.auth.keys_file:
        yield _seen("auth.keys_file", (config.auth.keys_file,), lambda: api_callers(config.auth, log))


def look_at_passwords(config: Config) -> tuple[str, str, bool] | None:
    """The same of those for NATS. A host has those of the roles that run there; `up` wants all."""
    folder = config.nats.credentials_dir
    if not folder:
        return None
    roles = [role for role in ROLES if not config.nats.url or (Path(folder) / role).exists()]

    def read() -> None:
        for role in roles:
            read_password(Path(folder) / role)
        if not roles:
            raise Rejected("nats.credentials_dir", f"{folder} has a password for none of {', '.join(ROLES)}")

    return _seen("nats.credentials_dir", (folder,), read)


def _seen(key: str, paths: Collection[str], read: Callable[[], object]) -> tuple[str, str, bool]:
    if any(path.startswith(CREDENTIAL) for path in paths):
        return key, UNSEEN, True
    try:
        read()
    except Rejected as error:
        return key, str(error), False
    return key, ", ".join(path for path in paths if path), True
