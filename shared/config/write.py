"""A Config back as TOML that `load_config` reads to an equal one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from stagemesh.shared.config.sections import Config


def dump_toml(config: Config) -> str:
    """The effective config: every value written out, those that are None left out."""
    document = msgspec.to_builtins(config)
    instances = document.pop("instances")
    blocks = [("[" + name + "]", table) for name, table in document.items()]
    blocks += [("[[instance]]", table) for table in instances]
    return "\n".join("\n".join([title, *_lines(table)]) + "\n" for title, table in blocks)


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if value is not None:
            yield f"{key} = {_literal(value)}"


def _literal(value: object) -> str:
    # JSON's strings, numbers and arrays are TOML's too, but for DEL, which TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
