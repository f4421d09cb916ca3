"""What a local mesh tells the outside once it serves: a record for programs and a few lines for people."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from stagemesh.shared.config import Config
from stagemesh.shared.runtime.child import Child


def ready_record(config: Config, children: Sequence[Child]) -> str:
    """The JSON of the ready file."""
    by_name = {child.spec.name: child for child in children}
    record = {
        "router": by_name["router"].address,
        "broker": by_name["broker"].address,
        "nats": config.nats.url,
        "run_dir": config.mesh.run_dir,
        "pid": os.getpid(),
        "processes": [_process(child) for child in children],
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"


def _process(child: Child) -> dict[str, object]:
    spec = child.spec
    return {
        "name": spec.name,
        "service": spec.service,
        "instance": spec.instance,
        "pp_rank": spec.pp_rank,
        "pid": child.pid,
        "address": child.address,
        "metrics": child.metrics or None,
    }


def ready_text(config: Config, router_address: str) -> str:
    layout = ", ".join(f"{instance.name} (pp {instance.pp_size})" for instance in config.instances)
    return (
        f"stagemesh serves {config.model.path} at {router_address} (gRPC): {layout}\n"
        f'  try:  stagemesh generate --router {router_address} --chat "What is the capital of France?"\n'
        f"  stop: Ctrl-C, or kill -TERM {os.getpid()}"
    )
