"""What a stage computes with: layers, pool, runner. Built once, before anything is announced."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stagemesh.shared.config import Config, InstanceSection
from stagemesh.shared.core.directory import PROTOCOL_VERSION, Manifest
from stagemesh.shared.core.layers import LayerRange, split_layers
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.layers import StageModel, allocate_pool, pool_bytes_per_page
from stagemesh.shared.model.memory import available_memory, check_memory
from stagemesh.shared.model.source import ModelSource, open_model
from stagemesh.shared.obs.log import Log

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StageParts:
    """`pool` is [num_pages, stage layers, 2, page_size, kv_heads, head_dim]."""

    config: ModelConfig
    manifest: Manifest
    layers: LayerRange
    dtype: torch.dtype
    pool: Tensor
    runner: StageRunner
    first: bool
    last: bool

    @property
    def layer_bytes(self) -> int:
        """Of one layer of one page: K and V."""
        return self.pool[0, 0].numel() * self.pool.element_size()


def build_parts(
    config: Config, instance: InstanceSection, pp_rank: int, progress: Callable[[str], None], log: Log
) -> StageParts:
    """Loads this stage's layers and takes its pool. Blocks for seconds. Raises Rejected for a model or a memory need
    that does not fit, before any of it is taken."""
    torch.set_num_threads(config.stage_threads(os.cpu_count() or 1))
    source = open_model(config.model.spec)
    model_config, dtype = source.config, _DTYPES[config.model.dtype]
    head = model_config.head_layers if instance.role == "decode" else 0.0  # a prefill step samples a few rows at most
    ranges = split_layers(model_config.num_layers, instance.pp_size, instance.layers, head_layers=head)
    layers, first, last = ranges[pp_rank], pp_rank == 0, pp_rank == instance.pp_size - 1
    num_pages = pool_pages(config, model_config, ranges, dtype)
    _check_fits(config, source, layers, num_pages, dtype, log, first=first, last=last)

    weights = source.load(layers, dtype, first=first, last=last, progress=_Tenths(progress))
    model = StageModel(model_config, layers, weights, dtype, first=first, last=last)
    pool = allocate_pool(model_config, len(layers), num_pages, config.engine.page_size, dtype)
    return StageParts(
        config=model_config,
        manifest=_manifest(config, source, num_pages),
        layers=layers,
        dtype=dtype,
        pool=pool,
        runner=StageRunner(model, pool, first=first, last=last),
        first=first,
        last=last,
    )


class _Tenths:
    """Says how far the loading is, at most ten times."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, 0
        say("loading weights")

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total
        if tenths > self._said:
            self._said = tenths
            self._say(f"loading weights, {tenths}0%")


def pool_pages(config: Config, model: ModelConfig, ranges: tuple[LayerRange, ...], dtype: torch.dtype) -> int:
    """Pages of an instance, the same on every stage: what the stage with the most layers can hold."""
    if config.engine.num_pages is not None:
        return config.engine.num_pages
    widest = max(len(layers) for layers in ranges)
    page_bytes = pool_bytes_per_page(model, widest, config.engine.page_size, dtype)
    if page_bytes > config.engine.pool_bytes:
        raise Rejected("engine.pool_bytes", f"must hold a page, which is {page_bytes} bytes")
    return config.engine.pool_bytes // page_bytes


def _check_fits(
    config: Config,
    source: ModelSource,
    layers: LayerRange,
    num_pages: int,
    dtype: torch.dtype,
    log: Log,
    *,
    first: bool,
    last: bool,
) -> None:
    weight_bytes = source.weight_bytes(layers, dtype, first=first, last=last)
    pool_bytes = num_pages * pool_bytes_per_page(source.config, len(layers), config.engine.page_size, dtype)
    available = available_memory()
    log.info(
        "memory needed",
        layers=f"[{layers.lo}, {layers.hi})",
        weight_bytes=weight_bytes,
        pool_bytes=pool_bytes,
        available_bytes=available,
    )
    check_memory(weight_bytes, pool_bytes, available)


def _manifest(config: Config, source: ModelSource, num_pages: int) -> Manifest:
    return Manifest(
        protocol_version=PROTOCOL_VERSION,
        fingerprint=source.fingerprint,
        dtype=config.model.dtype,
        page_size=config.engine.page_size,
        num_kv_heads=source.config.num_kv_heads,
        head_dim=source.config.head_dim,
        num_layers=source.config.num_layers,
        transfer_backend=config.transfer.backend,
        num_pages=num_pages,
        max_context=source.config.max_context,
    )
