"""The config of a mesh on one machine, from a few options: internal addresses are unix sockets in the run dir."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """`num_instances` pipelines of `pp_size` stages; `layers` a stage, empty for balanced ones."""

    pp_size: int = 2
    num_instances: int = 1
    layers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """What `stagemesh up` starts when it is given no config file. `port` 0 is any free one."""

    model: str = "smollm2"
    port: int = 8470
    prefill: RoleLayout = field(default_factory=RoleLayout)
    decode: RoleLayout = field(default_factory=RoleLayout)


def local_document(layout: LocalLayout, run_dir: Path) -> dict[str, Any]:
    """The tables of a config file for `layout`, to be checked like any other."""
    roles = (("prefill", layout.prefill), ("decode", layout.decode))
    return {
        "mesh": {"run_dir": str(run_dir)},
        "broker": {"listen": f"unix:{run_dir}/broker.sock"},
        "router": {"listen": f"127.0.0.1:{layout.port}"},
        "model": {"path": layout.model},
        "instance": [
            _instance(role, index, wanted, run_dir) for role, wanted in roles for index in range(wanted.num_instances)
        ],
    }


def _instance(role: str, index: int, wanted: RoleLayout, run_dir: Path) -> dict[str, Any]:
    name = f"{role}-{index}"
    return {
        "name": name,
        "role": role,
        "pp_size": wanted.pp_size,
        "layers": list(wanted.layers),
        "stages": [f"unix:{run_dir}/{name}.{rank}.sock" for rank in range(wanted.pp_size)],
    }
