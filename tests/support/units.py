"""Unit files as systemd reads them, as far as ours go: drop-ins, specifiers, environment, the command to run."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.mesh import ROOT

DEPLOY: Final = ROOT / "deploy" / "systemd"
UNITS: Final = "etc/systemd/system"
SERVICES: Final = (
    "stagemesh-nats.service",
    "stagemesh-broker.service",
    "stagemesh-router.service",
    "stagemesh-prefill@.service",
    "stagemesh-decode@.service",
    "stagemesh-openai.service",
)
_OURS: Final = re.compile(r"/(?:opt/stagemesh|etc/stagemesh|run/stagemesh|var/lib|var/cache)\b")
_UNITS_OF_TIME: Final = {"": 1.0, "s": 1.0, "min": 60.0, "ms": 0.001}


def install(root: Path, *drop_ins: str) -> None:
    """The units below `root`, by the script that administrators use."""
    subprocess.run(["bash", str(DEPLOY / "install.sh"), str(root), *drop_ins], check=True, capture_output=True)


@dataclass(slots=True)
class Unit:
    """`name` is an instance's for a template; `values` are lists by key of the section [Service]."""

    root: Path
    name: str
    values: dict[str, list[str]] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        return self.name.removesuffix(".service").partition("@")[2]

    def value(self, key: str) -> str:
        """The last one, with specifiers resolved."""
        return self._resolved(self.values[key][-1])

    def seconds(self, key: str) -> float:
        match = re.fullmatch(r"([0-9.]+)(s|min|ms|)", self.value(key))
        assert match, f"{self.name}: {key}={self.value(key)}"
        return float(match[1]) * _UNITS_OF_TIME[match[2]]

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair for line in self.values.get("Environment", []) for pair in shlex.split(line)]
        return {
            name: self._in_root(self._resolved(value)) for name, _, value in (pair.partition("=") for pair in pairs)
        }

    def command(self, key: str, environ: Mapping[str, str]) -> list[str]:
        """The program and its arguments, with ${NAME} from `environ` and paths below the root."""
        words = shlex.split(self.value(key).lstrip("-+!@:"))
        filled = [re.sub(r"\$\{(\w+)\}", lambda match: environ[match[1]], word) for word in words]
        return [self._in_root(word) for word in filled]

    def _resolved(self, text: str) -> str:
        specifiers = {
            "%": "%",
            "i": self.instance,
            "n": self.name,
            "N": self.name.removesuffix(".service"),
            "S": "/var/lib",
        }
        return re.sub("%(.)", lambda match: specifiers[match[1]], text)

    def _in_root(self, text: str) -> str:
        return text if text.startswith(str(self.root)) else _OURS.sub(lambda match: f"{self.root}{match[0]}", text)


def load_unit(root: Path, name: str) -> Unit:
    """The unit `name` below `root`, with the drop-ins of its prefix and its own."""
    template = re.sub("@.*", "@.service", name)
    units = root / UNITS
    unit = Unit(root, name)
    for path in (units / template, *_drop_ins(units, "stagemesh-.service"), *_drop_ins(units, template)):
        _read(path, unit.values)
    return unit


def _drop_ins(units: Path, name: str) -> list[Path]:
    return sorted((units / f"{name}.d").glob("*.conf"))


def _read(path: Path, values: dict[str, list[str]]) -> None:
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            values[key] = [*values.get(key, []), value] if value else []
