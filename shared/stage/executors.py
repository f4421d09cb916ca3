"""The executor that a stage's device asks for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from stagemesh.shared.config import Config
from stagemesh.shared.link.ring import RingReceiver, RingSender, RingSpec
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.stage.executor import Onwards, StageExecutor, yield_cores
from stagemesh.shared.stage.kv_sender import KvSender, PoolLayout, Report
from stagemesh.shared.stage.parts import StageLimits, StageParts
from stagemesh.shared.transfer.base import Endpoint


def make_receiver(endpoint: Endpoint, parts: StageParts, limits: StageLimits) -> RingReceiver | None:
    """Where the previous stage writes activations through the transfer backend; None where none does."""
    if parts.first or parts.device is not None:
        return None
    return RingReceiver(
        endpoint,
        num_slots=limits.num_slots,
        max_tokens=limits.step_tokens,
        hidden_size=parts.config.hidden_size,
        dtype=parts.dtype,
    )


def make_kv_sender(
    parts: StageParts,
    endpoint: Endpoint,
    config: Config,
    role: str,
    spawn: Callable[[Coroutine[Any, Any, None]], object],
    report: Report,
    tracer: Tracer,
    checksums: Checksums,
) -> KvSender | None:
    """Of a prefill stage."""
    if role != "prefill":
        return None
    sums = checksums if config.transfer.kv_checksum else None
    layout = PoolLayout(parts.pool.data_ptr(), parts.layers, parts.layer_bytes)
    page_size = config.engine.page_size
    return KvSender(endpoint, layout, page_size=page_size, spawn=spawn, report=report, tracer=tracer, checksums=sums)


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
