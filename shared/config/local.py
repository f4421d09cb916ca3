"""The config of a mesh on one machine, from a few options: internal addresses are unix sockets in the run dir."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """`num_instances` pipelines of `pp_size` stages; `layers` a stage, empty for balanced ones."""

    pp_size: int = 2
    num_instances: int = 1
    layers: Sequence[int] = ()
    gpus: Sequence[int] = ()
    """Of the stages, instance after instance, starting again where there are fewer."""


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """What `stagemesh up` starts when it is given no config file. `port` 0 is any free one."""

    model: str = "smollm2"
    port: int = 8470
    device: str = "cpu"
    prefill: RoleLayout = field(default_factory=RoleLayout)
    decode: RoleLayout = field(default_factory=RoleLayout)


CUDA_MODEL: Final = {"device": "cuda", "dtype": "bfloat16"}
CUDA_ENGINE: Final = {"chunk_size": 8192, "max_running": 256, "reserve_ahead": 48}
"""Steps on a GPU are worth launching from some thousand prompt tokens on."""
GPU_SHARE: Final = 0.9
"""Of a GPU's memory, for all the stages on it."""


def local_document(layout: LocalLayout, run_dir: Path) -> dict[str, Any]:
    """The tables of a config file for `layout`, to be checked like any other."""
    on_gpu = layout.device == "cuda"
    roles = (("prefill", layout.prefill), ("decode", layout.decode))
    instances = [
        _instance(role, index, wanted, run_dir) for role, wanted in roles for index in range(wanted.num_instances)
    ]
    if on_gpu:
        _share_memory(instances)
    return {
        "mesh": {"run_dir": str(run_dir)},
        "broker": {"listen": f"unix:{run_dir}/broker.sock"},
        "router": {"listen": f"127.0.0.1:{layout.port}"},
        "model": {"path": layout.model, **(CUDA_MODEL if on_gpu else {})},
        "engine": CUDA_ENGINE if on_gpu else {},
        "instance": instances,
    }


def _instance(role: str, index: int, wanted: RoleLayout, run_dir: Path) -> dict[str, Any]:
    name = f"{role}-{index}"
    return {
        "name": name,
        "role": role,
        "pp_size": wanted.pp_size,
        "layers": list(wanted.layers),
        "gpus": _gpus(wanted, index),
        "stages": [f"unix:{run_dir}/{name}.{rank}.sock" for rank in range(wanted.pp_size)],
    }


def _share_memory(instances: list[dict[str, Any]]) -> None:
    """Stages of one GPU get the same part of it each."""
    stages = Counter(gpu for instance in instances for gpu in _used(instance))
    for instance in instances:
        instance["memory_fraction"] = round(GPU_SHARE / max(stages[gpu] for gpu in _used(instance)), 3)


def _used(instance: Mapping[str, Any]) -> list[int]:
    return instance["gpus"] or [0] * instance["pp_size"]


def _gpus(wanted: RoleLayout, index: int) -> list[int]:
    """Those of instance `index`; none if the layout names none."""
    first = index * wanted.pp_size
    return [wanted.gpus[(first + rank) % len(wanted.gpus)] for rank in range(wanted.pp_size)] if wanted.gpus else []
