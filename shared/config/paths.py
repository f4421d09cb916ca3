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


def resolve_paths(config: Config, environ: Mapping[str, str], *, is_unit: bool = True) -> Config:
    """The same with `credential:NAME` as the path of that credential; as it is for whoever is no unit, and has none.
    Raises Rejected for a path that is relative, or a credential that the unit does not have."""
    sections = {}
    for name, keys in _PATHS.items():
        section = getattr(config, name)
        found = {key: _resolve(f"{name}.{key}", getattr(section, key), environ, is_unit) for key in keys}
        sections[name] = msgspec.structs.replace(section, **found)
    return msgspec.structs.replace(config, **sections)


def _resolve(field: str, text: str, environ: Mapping[str, str], is_unit: bool) -> str:
    if text.startswith(CREDENTIAL):
        name, directory = text.removeprefix(CREDENTIAL), environ.get(DIRECTORY, "")
        if "/" in name:
            raise Rejected(field, f"a credential's name has no slash, got {name!r}")
        if not is_unit:
            return text
        if not directory:
            raise Rejected(field, f"{text} needs {DIRECTORY}, which systemd sets for a unit with LoadCredential=")
        return f"{directory}/{name}" if name else directory
    if text and not text.startswith("/"):
        raise Rejected(field, f"must be an absolute path, or {CREDENTIAL}NAME; got {text!r}")
    return text
