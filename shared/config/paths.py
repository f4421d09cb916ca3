"""Where the files lie that a config names: absolute paths, or credentials that systemd hands to a unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from stagemesh.shared.config.sections import Config
from stagemesh.shared.errors import Rejected

CREDENTIAL: Final = "credential:"
DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
_PATHS: Final = {
    "tls": (
        "cert_file",
        "key_file",
        "ca_file",
        "public_cert_file",
        "public_key_file",
        "public_client_ca_file",
    ),
    "auth": ("keys_file",),
    "nats": ("credentials_dir",),
}


def resolve_paths(config: Config, environ: Mapping[str, str]) -> Config:
    """The same with `credential:NAME` as the path of that credential. Raises Rejected for a path that is relative, or
    a credential where there are none."""
    sections = {}
    for name, keys in _PATHS.items():
        section = getattr(config, name)
        found = {key: _resolve(f"{name}.{key}", getattr(section, key), environ) for key in keys}
        sections[name] = msgspec.structs.replace(section, **found)
    return msgspec.structs.replace(config, **sections)


def _resolve(field: str, text: str, environ: Mapping[str, str]) -> str:
    if text.startswith(CREDENTIAL):
        name, directory = text.removeprefix(CREDENTIAL), environ.get(DIRECTORY, "")
        if not directory:
            raise Rejected(field, f"{text} needs {DIRECTORY}, which systemd sets for a unit with LoadCredential=")
        if "/" in name:
            raise Rejected(field, f"a credential's name has no slash, got {name!r}")
        return f"{directory}/{name}" if name else directory
    if text and not text.startswith("/"):
        raise Rejected(field, f"must be an absolute path, or {CREDENTIAL}NAME; got {text!r}")
    return text
