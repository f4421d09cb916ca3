"""What a local mesh tells the outside once it serves: a record for programs and a few lines for people."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import LOOPBACK
from stagemesh.shared.runtime.child import Child


def ready_record(config: Config, children: Sequence[Child]) -> str:
    """The JSON of the ready file."""
    by_name = {child.spec.name: child for child in children}
    record = {
        "router": by_name["router"].address,
        "openai": by_name["openai"].address if "openai" in by_name else None,
        "broker": by_name["broker"].address,
        "nats": config.nats.url,
        "nats_credentials": config.nats.credentials_dir,
        "mesh": config.mesh.name,
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


def ready_text(config: Config) -> str:
    """For a config whose addresses are known."""
    router, port = config.router.listen, config.openai.port
    layout = ", ".join(f"{instance.name} (pp {instance.pp_size})" for instance in config.instances)
    lines = [
        f"stagemesh serves {config.model.path} at {router} (gRPC): {layout}",
        f'  try:  stagemesh generate --router {router} --chat "What is the capital of France?"',
        f"  stop: Ctrl-C, or kill -TERM {os.getpid()}",
    ]
    if port is not None:
        lines.insert(1, f"  OpenAI clients: http://{LOOPBACK}:{port}/v1, model {config.model.served_name}")
    return "\n".join(lines)
