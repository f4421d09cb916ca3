"""From a TOML file, the environment and command-line options to a checked Config, once, at start.

file -> secrets -> STAGEMESH_<SECTION>__<KEY> -> options -> types and ranges (sections) -> what fits together (check)

Later sources win. Every error is Rejected, names the key and says where the value came from. A secret is a file
`config_<section>__<key>` of $CREDENTIALS_DIRECTORY, as systemd's LoadCredential= makes it; no error quotes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stagemesh.shared.config.check import check_config
from stagemesh.shared.config.convert import convert_document, convert_text
from stagemesh.shared.config.paths import resolve_paths
from stagemesh.shared.config.sections import Config
from stagemesh.shared.errors import Rejected

ENV_PREFIX = "STAGEMESH_"
ENV_SEPARATOR = "__"
SECRETS_VARIABLE = "CREDENTIALS_DIRECTORY"
SECRET_PREFIX = "config_"
SECRET_ORIGIN = "the credential "


def load_config(path: Path, environ: Mapping[str, str]) -> Config:
    """The config of `path` with the overrides of `environ`, and the secrets it points to. Raises Rejected."""
    folder = environ.get(SECRETS_VARIABLE, "")
    secrets = read_secrets(Path(folder)) if folder else {}
    return build_config(read_document(path), source=str(path), environ=environ, secrets=secrets)


def read_secrets(folder: Path) -> dict[str, str]:
    """The secrets of `folder` by `section__key`, without the newline at their end. Raises Rejected."""
    try:
        files = sorted(folder.glob(f"{SECRET_PREFIX}*{ENV_SEPARATOR}*"))
        return {file.name.removeprefix(SECRET_PREFIX): file.read_text().removesuffix("\n") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise Rejected("config", f"cannot read the credentials in {folder}: {error}") from None


def read_document(path: Path) -> dict[str, Any]:
    """The file's tables, unchecked. Raises Rejected if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Rejected("config", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected("config", f"{path} is not TOML: {error}") from error


def build_config(
    document: Mapping[str, Any],
    *,
    source: str,
    environ: Mapping[str, str],
    options: Mapping[str, object] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> Config:
    """A checked Config of `document`, which came from `source`. `options` maps `section.key` to a value given on the
    command line, `secrets` maps `section__key` to one that is not to be shown. Raises Rejected."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in document.items()}
    origins: dict[str, str] = {}
    for origin, section, key, text in (*_secret_overrides(secrets or {}), *_overrides(environ)):
        try:
            _assign(merged, section, key, convert_text(section, key, text))
        except Rejected as error:
            raise _with_origin(error, origin) from None
        origins[f"{section}.{key}"] = origin
    for field, value in (options or {}).items():
        section, _, key = field.partition(".")
        _assign(merged, section, key, value)
        origins[field] = "the command line"
    try:
        config = resolve_paths(convert_document(merged), environ)
        check_config(config)
    except Rejected as error:
        raise _with_origin(error, origins.get(error.field, source)) from None
    return config


def _overrides(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(variable, section, key, text) of every variable that is an override."""
    for name in sorted(environ):
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition(ENV_SEPARATOR)
        if name.startswith(ENV_PREFIX) and separator:
            yield name, section, key, environ[name]


def _secret_overrides(secrets: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    for name, text in sorted(secrets.items()):
        section, _, key = name.partition(ENV_SEPARATOR)
        yield f"{SECRET_ORIGIN}{SECRET_PREFIX}{name}", section, key, text


def _assign(merged: dict[str, Any], section: str, key: str, value: object) -> None:
    table = merged.setdefault(section, {})
    if isinstance(table, dict):  # one that is no table is reported when the document is converted
        table[key] = value


def _with_origin(error: Rejected, origin: str) -> Rejected:
    if origin.startswith(SECRET_ORIGIN):
        return Rejected(error.field, f"does not fit; its value is not shown (in {origin})")
    return Rejected(error.field, f"{str(error).removeprefix(f'{error.field}: ')} (in {origin})")
