"""How much host memory the stages of a deployment need that are to start on this host."""

from __future__ import annotations

from collections.abc import Collection

from stagemesh.shared.config import Config
from stagemesh.shared.core.layers import split_layers
from stagemesh.shared.model.layers import pool_bytes_per_page
from stagemesh.shared.model.source import ModelSource
from stagemesh.shared.stage.parts import DTYPES, pool_pages


def needed_bytes(config: Config, source: ModelSource, stages: Collection[str]) -> int:
    """Weights, pools and room for retracted sequences. `stages` are keys of the config: instance[0].stages[1]."""
    model, dtype, total = source.config, DTYPES[config.model.dtype], 0
    for index, instance in enumerate(config.instances):
        decodes = instance.role == "decode"
        head = model.head_layers if decodes else 0.0
        ranges = split_layers(model.num_layers, instance.pp_size, instance.layers, head_layers=head)
        for rank, layers in enumerate(ranges):
            if f"instance[{index}].stages[{rank}]" not in stages:
                continue
            last = rank == instance.pp_size - 1
            total += source.weight_bytes(layers, dtype, first=rank == 0, last=last)
            page_bytes = pool_bytes_per_page(model, len(layers), config.engine.page_size, dtype)
            total += pool_pages(config, instance, source, ranges, dtype) * page_bytes
            total += config.engine.host_kv_bytes if decodes else 0
    return total
