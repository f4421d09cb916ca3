"""Config files, and what the environment overrides in them. What is accepted can be written and read again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from stagemesh.shared.config import build_config, dump_toml, load_config
from stagemesh.shared.config.local import LocalLayout, local_document
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import junk, junk_text, mutate_bytes, mutate_json

DOTTED: Final = ".".join("a" * 3000)
NESTED: Final = ("a = " + "[" * 5000, "a = " + "{a=" * 3000, f"{DOTTED} = 1", f"[{DOTTED}]")


def toml_of(document: Mapping[str, Any]) -> str:
    """Any JSON value as TOML, as far as it goes."""
    lines = [f"{key} = {_value(value)}" for key, value in document.items() if not _is_table(value)]
    for key, value in document.items():
        for name, table in _tables(key, value):
            lines += [name, *(f"{k if k.isidentifier() else json.dumps(k)} = {_value(v)}" for k, v in table.items())]
    return "\n".join(lines)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _tables(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, dict):
        yield f"[{key}]", value
    elif _is_table(value):
        for each in value:
            if isinstance(each, dict):
                yield f"[[{key}]]", each


def _value(value: Any) -> str:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_value, value)) + "]"
        case None:
            return '"null"'
        case _:
            return json.dumps(value)


def right_document(rng: Random, folder: Path) -> dict[str, Any]:
    document = local_document(LocalLayout(), folder)
    document["engine"] = {"page_size": 16, "num_pages": 100, "priority_ageing_s": 5.0, "prefix_cache": True}
    document["transfer"] = {"backend": "memory", "max_batch_bytes": 1 << 20}
    document["nats"] = {"url": "nats://127.0.0.1:4222"}
    document["metrics"] = {"port": rng.randrange(100)}
    if rng.random() < 0.3:  # reached from other hosts
        document["router"]["listen"], document["transfer"]["host"] = "10.0.0.1:8470", "10.0.0.1"
        document["transfer"]["private_network"] = True
        document["tls"] = {key: f"/etc/{key}.pem" for key in ("cert_file", "key_file", "ca_file")}
        document["auth"], document["nats"] = {"keys_file": "/etc/keys"}, {"url": "tls://nats.example:4222"}
    return document


def open_files(folder: Path) -> Try:
    path = folder / "mesh.toml"

    def attempt(rng: Random) -> None:
        document = right_document(rng, folder)
        match rng.randrange(12):
            case 0:
                path.write_bytes(rng.randbytes(rng.randrange(60)))
            case 1:
                path.write_text(rng.choice(NESTED))
            case 2 | 3:
                path.write_bytes(mutate_bytes(rng, toml_of(document).encode()))
            case _:
                changed = mutate_json(rng, document)
                text = toml_of(changed) if isinstance(changed, dict) else _value(changed)
                path.write_text(text, encoding="utf-8", errors="replace")
        written = folder / "again.toml"
        config = load_config(path, {})
        written.write_text(dump_toml(config), encoding="utf-8")
        assert load_config(written, {}) == config

    return attempt


def open_overrides(folder: Path) -> Try:
    sections = [
        "mesh",
        "nats",
        "broker",
        "router",
        "model",
        "engine",
        "transfer",
        "metrics",
        "tls",
        "auth",
        "instance",
        "no",
    ]
    keys = ("run_dir", "url", "listen", "max_waiting_s", "path", "page_size", "num_pages", "prefix_cache", "port")

    def attempt(rng: Random) -> None:
        document = right_document(rng, folder)
        environ = {}
        for _ in range(rng.randrange(1, 4)):
            section = rng.choice(sections)
            known = document.get(section)
            key = rng.choice([*(known if isinstance(known, dict) else ()), *keys])
            value = str(junk(rng)) if rng.random() < 0.6 else junk_text(rng)
            name = f"STAGEMESH_{section}__{key}".upper() if rng.random() < 0.9 else f"STAGEMESH_{junk_text(rng)}__X"
            environ[name] = value
        build_config(document, source="the test", environ=environ)

    return attempt


TARGETS: Final = (Target("config-file", 12, open_files), Target("config-overrides", 8, open_overrides))
