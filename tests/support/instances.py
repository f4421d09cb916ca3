"""Instances as they report themselves, with what a test wants to be different."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad, Manifest, RegionKey, Role, StageInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.layers import split_layers

PREFILL, DECODE = Role.PREFILL, Role.DECODE
MANIFEST: dict[str, Any] = {
    "protocol_version": 1,
    "fingerprint": "f",
    "dtype": "float32",
    "page_size": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_layers": 4,
    "transfer_backend": "memory",
    "num_pages": 16,
    "max_context": 64,
}


def instance_of(
    name: str,
    role: Role,
    *,
    epoch: int = 1,
    sizes: Sequence[int] = (2, 2),
    load: InstanceLoad | None = None,
    accepting: bool = True,
    **manifest: Any,
) -> InstanceInfo:
    """Stages of `sizes` layers; `manifest` overrides fields of MANIFEST."""
    layers = split_layers(sum(sizes), len(sizes), sizes)
    return InstanceInfo(
        ref=InstanceRef(name, epoch),
        role=role,
        address=f"unix:{name}",
        manifest=Manifest(**{**MANIFEST, "num_layers": sum(sizes), **manifest}),
        stages=tuple(
            StageInfo(rank, part, f"unix:{name}-{rank}", RegionKey(f"{name}/{rank}", 4096 * rank, 4096))
            for rank, part in enumerate(layers)
        ),
        load=load or InstanceLoad(),
        accepting=accepting,
    )


def with_last_stage(info: InstanceInfo, address: str) -> InstanceInfo:
    """The same, but for the address of its last stage."""
    *others, last = info.stages
    return dataclasses.replace(info, stages=(*others, dataclasses.replace(last, address=address)))
