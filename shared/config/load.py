"""From a TOML file, the environment and command-line options to a checked Config, once, at start.

file -> STAGEMESH_<SECTION>__<KEY> -> options -> types and ranges (sections) -> what must fit together (check)

Later sources win. Every error is Rejected, names the key and says where the value came from.
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


def load_config(path: Path, environ: Mapping[str, str]) -> Config:
    """The config of `path` with the overrides of `environ`. Raises Rejected."""
    return build_config(read_document(path), source=str(path), environ=environ)


def look_at_config(path: Path, environ: Mapping[str, str]) -> Config:
    """The same for a command that is no process of the deployment: `credential:NAME` stays as it is written, for only
    its unit has it."""
    return build_config(read_document(path), source=str(path), environ=environ, is_unit=False)


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
    is_unit: bool = True,
) -> Config:
    """A checked Config of `document`, which came from `source`. `options` maps `section.key` to a value given on the
    command line. Raises Rejected."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in document.items()}
    origins: dict[str, str] = {}
    for name, section, key in _overrides(environ):
        try:
            _assign(merged, section, key, convert_text(section, key, environ[name]))
        except Rejected as error:
            raise _with_origin(error, name) from error
        origins[f"{section}.{key}"] = name
    for field, value in (options or {}).items():
        section, _, key = field.partition(".")
        _assign(merged, section, key, value)
        origins[field] = "the command line"
    try:
        config = resolve_paths(convert_document(merged), environ, is_unit=is_unit)
        check_config(config)
    except Rejected as error:
        raise _with_origin(error, origins.get(error.field, source)) from error
    return config


def _overrides(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(variable, section, key) of every variable that is an override."""
    for name in sorted(environ):
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition(ENV_SEPARATOR)
        if name.startswith(ENV_PREFIX) and separator:
            yield name, section, key


def _assign(merged: dict[str, Any], section: str, key: str, value: object) -> None:
    table = merged.setdefault(section, {})
    if isinstance(table, dict):  # one that is no table is reported when the document is converted
        table[key] = value


def _with_origin(error: Rejected, origin: str) -> Rejected:
    return Rejected(error.field, f"{str(error).removeprefix(f'{error.field}: ')} (in {origin})")
