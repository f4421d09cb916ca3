"""What a stage computes with: layers, pool, runner. Built once, before anything is announced."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from torch import Tensor

from stagemesh.shared.config import Config, InstanceSection
from stagemesh.shared.config.hosts import stage_threads
from stagemesh.shared.config.sections import Role
from stagemesh.shared.core.directory import PROTOCOL_VERSION, Manifest
from stagemesh.shared.core.layers import LayerRange, split_layers
from stagemesh.shared.engine.host_copies import CpuPageCopier, HostCopies
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.errors import Rejected
from stagemesh.shared.link.ring import RingSpec
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.layers import StageModel, allocate_pool, pool_bytes_per_page
from stagemesh.shared.model.memory import available_memory, check_memory
from stagemesh.shared.model.source import ModelSource, open_model
from stagemesh.shared.model.weights import StageWeights
from stagemesh.shared.obs.log import Log

if TYPE_CHECKING:
    from stagemesh.shared.stage.cuda_parts import DeviceParts


DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What a ring slot must hold, and how many there must be: the tokens of a step, the steps outstanding at once."""

    step_tokens: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class StageParts:
    """`pool` is [num_pages, stage layers, 2, page_size, kv_heads, head_dim]."""

    config: ModelConfig
    manifest: Manifest
    layers: LayerRange
    dtype: torch.dtype
    pool: Tensor
    weights: StageWeights
    runner: StageRunner
    first: bool
    last: bool
    device: DeviceParts | None = None  # on a GPU

    @property
    def bound_to_role(self) -> str | None:
        """Why the stage cannot take the other role with the weights that it has; None if it can."""
        packed = self.device is not None and self.device.packed
        return "decode has packed its matrices on this GPU, and prefill cannot use those" if packed else None

    @property
    def inbox_spec(self) -> RingSpec | None:
        """Where the previous stage writes on this one's GPU."""
        return None if self.device is None or self.device.inbox is None else self.device.inbox.spec

    @property
    def layer_bytes(self) -> int:
        """Of one layer of one page: K and V."""
        return self.pool[0, 0].numel() * self.pool.element_size()


def build_parts(
    config: Config,
    instance: InstanceSection,
    pp_rank: int,
    limits: StageLimits,
    progress: Callable[[str], None],
    log: Log,
) -> StageParts:
    """Loads this stage's layers and takes its pool. Blocks for seconds. Raises Rejected for a model or a memory need
    that does not fit, before any of it is taken."""
    torch.set_num_threads(stage_threads(config, instance.stages[pp_rank], os.cpu_count() or 1))
    on_gpu = config.model.device == "cuda"
    if on_gpu:
        see_gpu(instance, pp_rank)
    source = open_model(config.model.spec)
    model_config, dtype = source.config, DTYPES[config.model.dtype]
    model_config.check_device(config.model.device, config.model.spec)
    head = model_config.head_layers if instance.role == "decode" else 0.0  # a prefill step samples a few rows at most
    ranges = split_layers(model_config.num_layers, instance.pp_size, instance.layers, head_layers=head)
    layers, first, last = ranges[pp_rank], pp_rank == 0, pp_rank == instance.pp_size - 1
    num_pages = pool_pages(config, instance, source, ranges, dtype)
    if not on_gpu:
        _check_fits(config, source, layers, num_pages, dtype, log, first=first, last=last)

    told = _Quarters(progress, "loading weights")
    device = config.model.device
    weights = source.load(layers, dtype, first=first, last=last, device=device, progress=told)
    pool = allocate_pool(model_config, len(layers), num_pages, config.engine.page_size, dtype, device)
    runner, device_parts = _build_runner(
        config, instance, model_config, layers, weights, pool, dtype, limits, progress, first=first, last=last
    )
    return StageParts(
        config=model_config,
        manifest=_manifest(config, source, num_pages),
        layers=layers,
        dtype=dtype,
        pool=pool,
        weights=weights,
        runner=runner,
        first=first,
        last=last,
        device=device_parts,
    )


def rebuild_parts(
    parts: StageParts,
    config: Config,
    instance: InstanceSection,
    role: Role,
    limits: StageLimits,
    progress: Callable[[str], None],
) -> StageParts:
    """What the other role computes with, over the same weights and pool. Blocks, on a GPU for seconds."""
    runner, device = _build_runner(
        config,
        structs.replace(instance, role=role),
        parts.config,
        parts.layers,
        parts.weights,
        parts.pool,
        parts.dtype,
        limits,
        progress,
        first=parts.first,
        last=parts.last,
        packs=False,  # what is packed could not be taken apart again
    )
    return replace(parts, runner=runner, device=device)


def see_gpu(instance: InstanceSection, pp_rank: int) -> None:
    """Makes the stage's GPU the only one that this process sees. Raises Rejected where there is none."""
    if instance.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(instance.gpus[pp_rank])  # read when CUDA is first used
    from stagemesh.shared.stage.cuda_parts import check_cuda

    check_cuda()


def _build_runner(
    config: Config,
    instance: InstanceSection,
    model_config: ModelConfig,
    layers: LayerRange,
    weights: StageWeights,
    pool: Tensor,
    dtype: torch.dtype,
    limits: StageLimits,
    progress: Callable[[str], None],
    *,
    first: bool,
    last: bool,
    packs: bool = True,
) -> tuple[StageRunner, DeviceParts | None]:
    if config.model.device == "cpu":
        model = StageModel(model_config, layers, weights, dtype, first=first, last=last)
        copies = HostCopies(CpuPageCopier(pool), config.engine.host_kv_bytes)
        return StageRunner(model, pool, first=first, last=last, copies=copies), None
    from stagemesh.shared.stage.cuda_parts import build_device

    return build_device(
        config,
        instance.role,
        model_config,
        layers,
        weights,
        pool,
        dtype,
        limits,
        _Quarters(progress, "capturing CUDA graphs"),
        pp_size=instance.pp_size,
        first=first,
        last=last,
        packs=packs,
    )


class _Quarters:
    """Says how far it is, at the start and at most four times more."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say, self._said, self._what = say, 0, what
        say(what)

    def __call__(self, done: int, total: int) -> None:
        quarters = 4 * done // total
        if quarters > self._said:
            self._said = quarters
            self._say(f"{self._what}, {25 * quarters}%")


def pool_pages(
    config: Config, instance: InstanceSection, source: ModelSource, ranges: tuple[LayerRange, ...], dtype: torch.dtype
) -> int:
    """Pages of an instance, the same on every stage: what the stage with the most layers can hold."""
    if config.engine.num_pages is not None:
        return config.engine.num_pages
    if config.model.device == "cuda":
        from stagemesh.shared.stage.cuda_parts import cuda_pool_pages

        return cuda_pool_pages(config, instance, source, ranges, dtype)
    model = source.config
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
