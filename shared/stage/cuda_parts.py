"""What a stage on a GPU computes with, beside what every stage has: its stream, its inbox, its graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from stagemesh.shared.config import Config, InstanceSection
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.engine.cuda_copier import CudaPageCopier
from stagemesh.shared.engine.cuda_runner import CudaStageRunner
from stagemesh.shared.engine.host_copies import HostCopies
from stagemesh.shared.errors import Rejected
from stagemesh.shared.link.cuda_ring import DeviceInbox
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.cuda.decode import DecodeGraphs
from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.packed import PackedStageModel, can_pack
from stagemesh.shared.model.cuda.prefill import PrefillForward
from stagemesh.shared.model.layers import pool_bytes_per_page
from stagemesh.shared.model.source import ModelSource
from stagemesh.shared.model.weights import StageWeights
from stagemesh.shared.stage.parts import StageLimits

RESERVED_BYTES = 4 << 30  # of a stage: context, workspaces, graphs, activations of a chunk
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """`inbox` is None where nothing comes from another stage over the devices: on the first prefill stage. `beside` is
    the stream that hands on what decode's steps leave; None in prefill, whose steps are long and leave much. `max_rows`
    are those of a step: sequences in decode, tokens in prefill."""

    stream: torch.cuda.Stream
    beside: torch.cuda.Stream | None
    inbox: DeviceInbox | None
    max_rows: int
    packed: bool


def check_cuda() -> None:
    """Raises Rejected where there is no GPU that PyTorch can use."""
    if not torch.cuda.is_available():
        raise Rejected("model.device", "'cuda' needs a GPU and a CUDA build of PyTorch; neither is seen here")


def cuda_pool_pages(
    config: Config, instance: InstanceSection, source: ModelSource, ranges: tuple[LayerRange, ...], dtype: torch.dtype
) -> int:
    """Pages of an instance, the same on every stage: what the tightest can hold on GPUs of this one's size."""
    total = torch.cuda.get_device_properties(0).total_memory
    counts = []
    for rank, layers in enumerate(ranges):
        weights = source.weight_bytes(layers, dtype, first=rank == 0, last=rank == len(ranges) - 1)
        room = round(instance.memory_fraction * total) - weights - RESERVED_BYTES
        counts.append(room // pool_bytes_per_page(source.config, len(layers), config.engine.page_size, dtype))
    if min(counts) < 1:
        raise Rejected("memory_fraction", f"{instance.memory_fraction} of {total} bytes holds weights and no page")
    return min(counts)


def build_device(
    config: Config,
    role: str,
    model_config: ModelConfig,
    layers: LayerRange,
    weights: StageWeights,
    pool: Tensor,
    dtype: torch.dtype,
    sizes: StageLimits,
    progress: Callable[[int, int], None],
    *,
    pp_size: int,
    first: bool,
    last: bool,
    packs: bool,
) -> tuple[CudaStageRunner, DeviceParts]:
    """Takes what the stage needs on its GPU and captures its graphs."""
    copies = HostCopies(CudaPageCopier(pool), config.engine.host_kv_bytes)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    decodes = role == "decode"
    max_rows = ceil(sizes.step_tokens / (pp_size + config.engine.extra_depth)) + 1 if decodes else sizes.step_tokens
    packs = packs and decodes and can_pack(weights, dtype, max_rows)
    make = PackedStageModel if packs else CudaStageModel
    model = make(model_config, layers, weights, dtype, first=first, last=last)
    width = ID_BYTES if first else model_config.hidden_size * dtype.itemsize
    inbox = None
    if decodes or not first:
        inbox = DeviceInbox(num_slots=sizes.num_slots, slot_bytes=max_rows * width)
    graphs = chunks = None
    if decodes:
        assert inbox is not None
        slots = inbox.slots()
        graphs = DecodeGraphs(
            model,
            pool,
            num_slots=sizes.num_slots,
            max_rows=max_rows,
            inbox=None if first else slots.view(dtype).view(sizes.num_slots, max_rows, -1),
            sampled=slots.view(torch.int64) if first else None,
            graphs=config.engine.cuda_graphs,
        )
        graphs.capture(stream, progress)
    else:
        with torch.cuda.stream(stream), torch.inference_mode():
            chunks = PrefillForward(model, pool, sizes.num_slots, sizes.step_tokens)
            chunks.warm_up(sizes.step_tokens)
    torch.cuda.synchronize()  # the pool is zeroed before anybody may write to it
    runner = CudaStageRunner(
        model, pool, copies, num_slots=sizes.num_slots, max_rows=max_rows, graphs=graphs, chunks=chunks
    )
    beside = torch.cuda.Stream() if decodes else None  # type: ignore[no-untyped-call]
    return runner, DeviceParts(stream, beside, inbox, max_rows, packs)
