"""The layers of a decode stage with its matrices packed, so that a step streams its weights at the card's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.cuda.kernels import rope_append
from stagemesh.shared.model.cuda.layers import Attend, CudaStageModel
from stagemesh.shared.model.cuda.matmul import MatmulWorkspace, linear_add_, norm_gate_up_silu, norm_linear
from stagemesh.shared.model.cuda.packing import PackedWeight, fold_norm, pack
from stagemesh.shared.model.weights import LayerWeights, StageWeights

MOST_ROWS: Final = 80
"""Of a step: up to 64 rows are one tile; with two of them, cuBLAS is faster."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """`output` [hidden, heads * head_dim] is as it was: small enough that cuBLAS is faster."""

    qkv: PackedWeight
    output: Tensor
    gate_up: PackedWeight
    down: PackedWeight


def can_pack(weights: StageWeights, dtype: torch.dtype, max_rows: int) -> bool:
    """Hopper, bfloat16, and nothing done to a matrix's result."""
    if dtype != torch.bfloat16 or max_rows > MOST_ROWS or torch.cuda.get_device_capability()[0] != 9:
        return False
    return not any(
        more is not None
        for layer in weights.layers
        for more in (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias, layer.query_norm)
    )


class PackedStageModel(CudaStageModel):
    """A `CudaStageModel` for steps of at most `MOST_ROWS` rows. Layer after layer, the matrices that it packs are taken
    out of `weights`, where they are empty from then on: there is never room for two of each."""

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerRange,
        weights: StageWeights,
        dtype: torch.dtype,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__(config, layers, weights, dtype, first=first, last=last)
        self._workspace = MatmulWorkspace()
        self._packed = tuple(_packed(layer) for layer in weights.layers)

    def run_layers(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, pool: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        eps, workspace = self.config.rms_norm_eps, self._workspace
        for index, layer in enumerate(self._packed):
            qkv = norm_linear(hidden, layer.qkv, eps, workspace)
            query = rope_append(
                qkv, self._cos, self._sin, positions, slots, pool[:, index], self.config.num_heads, chained=True
            )
            hidden.addmm_(attend(index, query).view(len(hidden), -1), layer.output.T)
            inner = norm_gate_up_silu(hidden, layer.gate_up, eps, workspace)
            linear_add_(inner, layer.down, hidden, workspace)
        return hidden, None


def _packed(layer: LayerWeights) -> PackedLayer:
    packed = PackedLayer(
        pack(fold_norm(layer.qkv, layer.input_norm)),
        layer.output,
        pack(fold_norm(layer.gate_up, layer.post_norm), paired=True),
        pack(layer.down),
    )
    for taken in (layer.qkv, layer.gate_up, layer.down):
        taken.untyped_storage().resize_(0)
    return packed
