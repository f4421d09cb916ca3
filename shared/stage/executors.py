"""The executor that a stage's device asks for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from stagemesh.shared.link.ring import RingReceiver, RingSender, RingSpec
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.executor import Onwards, StageExecutor, yield_cores
from stagemesh.shared.stage.kv_sender import KvSender
from stagemesh.shared.stage.parts import StageParts
from stagemesh.shared.transfer.base import Endpoint


def make_executor(
    parts: StageParts,
    endpoint: Endpoint,
    receiver: RingReceiver | None,
    spec: RingSpec | None,
    onwards: Onwards,
    kv: KvSender | None,
    *,
    spawn: Callable[[Coroutine[Any, Any, None]], object],
    tracer: Tracer,
    nice: int,
) -> StageExecutor:
    """`receiver` is this stage's ring where the transfer backend carries activations, `spec` where the next stage wants
    them. `nice` is how far forward passes on the CPU yield the cores."""
    if parts.device is not None:
        from stagemesh.shared.stage.cuda_executor import make_cuda_executor

        return make_cuda_executor(parts, parts.device, spec, onwards, kv, spawn, tracer)
    sender = None
    if spec is not None:
        sender = RingSender(endpoint, spec, hidden_size=parts.config.hidden_size, dtype=parts.dtype)
    return StageExecutor(
        parts.runner,
        onwards,
        receiver=receiver,
        sender=sender,
        kv=kv,
        spawn=spawn,
        tracer=tracer,
        prepare_thread=partial(yield_cores, nice),
    )
