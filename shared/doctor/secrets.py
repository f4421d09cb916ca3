"""Whether the files of certificates, keys and passwords that a config names are there and are right."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagemesh.shared.bus.access import read_password
from stagemesh.shared.bus.roles import ROLES
from stagemesh.shared.config import Config
from stagemesh.shared.config.paths import CREDENTIAL
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.access import api_callers, mesh_access, public_listening
from stagemesh.shared.security.expiry import describe_end, is_soon
from stagemesh.shared.security.material import Material

UNSEEN: Final = "credentials of a unit, which only it can read"


@dataclass(frozen=True, slots=True)
class Secret:
    """`key` of the config, what was seen there, and whether it is right; `is_short`: not for long any more."""

    key: str
    seen: str
    is_right: bool
    is_short: bool = False


def look_at_secrets(config: Config, here: Collection[str]) -> Iterator[Secret]:
    """Each that processes on this host read; `here` are the fields of the addresses that are this host's."""
    log, tls = Log(logging.getLogger(__name__)), config.tls
    if tls.is_on:
        files = (tls.cert_file, tls.key_file, tls.ca_file)
        yield _seen("tls", files, lambda: mesh_access(tls, log).material)
    if "router.listen" not in here:
        return
    public = (tls.public_cert_file, tls.public_key_file, tls.public_client_ca_file)
    if any(public):
        yield _seen("tls.public", public, lambda: public_listening(tls, log).material)
    if config.auth.keys_file:
        yield _seen("auth.keys_file", (config.auth.keys_file,), lambda: api_callers(config.auth, log))


def look_at_passwords(config: Config) -> Secret | None:
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


def _seen(key: str, paths: Collection[str], read: Callable[[], object]) -> Secret:
    if any(path.startswith(CREDENTIAL) for path in paths):
        return Secret(key, UNSEEN, True)
    try:
        found = read()
    except Rejected as error:
        return Secret(key, str(error), False)
    seen = ", ".join(path for path in paths if path)
    end_s, now_s = found.current().not_after_s if isinstance(found, Material) else None, time.time()
    if end_s is None:
        return Secret(key, seen, True)
    return Secret(key, f"{seen}; {describe_end(end_s, now_s)}", end_s > now_s, is_soon(end_s, now_s))
