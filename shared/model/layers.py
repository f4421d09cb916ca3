"""The layers of one stage: a forward pass over a paged KV pool, and the pool itself.

token ids -> [embedding] -> layers lo..hi -> hidden [T, hidden] -> the next stage
                                          -> [norm, head of the chosen tokens] -> logits [R, vocab]

The numerics are those of `transformers` (norms and angles in float32 in every dtype), so that greedy tokens are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.model.attention.base import AttentionPlan
from stagemesh.shared.model.attention.cpu import CpuAttention
from stagemesh.shared.model.batch import ForwardBatch
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.experts import run_experts
from stagemesh.shared.model.project import project
from stagemesh.shared.model.rope import Rotation, attention_factor, inverse_frequencies
from stagemesh.shared.model.weights import LayerWeights, StageWeights


def pool_bytes_per_page(config: ModelConfig, num_layers: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of a stage with `num_layers` layers."""
    return num_layers * 2 * page_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def allocate_pool(
    config: ModelConfig, num_layers: int, num_pages: int, page_size: int, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """A zeroed pool [num_pages, num_layers, 2, page_size, kv_heads, head_dim], contiguous."""
    shape = (num_pages, num_layers, 2, page_size, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


class StageModel:
    """Layers `layers` of a model; the embedding too if `first`, final norm and head too if `last`.

    Not for use by two threads at once: attention keeps scratch memory between calls.
    """

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
        assert len(weights.layers) == len(layers), (layers, len(weights.layers))
        self.config, self.layers, self.dtype = config, layers, dtype
        self.first, self.last = first, last
        self._weights = weights
        self._frequencies, self._rope_factor = inverse_frequencies(config), attention_factor(config)
        self._attention = CpuAttention(config.num_kv_heads, config.head_dim, config.sliding_window, dtype)

    @torch.inference_mode()
    def forward(self, inputs: Tensor, batch: ForwardBatch, pool: Tensor) -> Tensor:
        """One step. `inputs`: int64 [T] token ids if first, else [T, hidden]; never written to. Returns [T, hidden]
        in the stage's dtype or, if last, logits [R, vocab] of `batch.logit_rows` (float32; float64 if dtype is)."""
        hidden = inputs
        if self._weights.embedding is not None and self.first:
            hidden = self._weights.embedding.index_select(0, inputs)
        rotation = Rotation(self._frequencies, batch.positions, self.dtype, self._rope_factor)
        plan = self._attention.plan(batch, pool)
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attend(layer, index, hidden, rotation, plan)
            hidden = hidden + self._mlp(layer, hidden)
        return self._logits(hidden.index_select(0, batch.logit_rows)) if self.last else hidden

    def _attend(
        self, layer: LayerWeights, index: int, hidden: Tensor, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        config = self.config
        normed = self._norm(hidden, layer.input_norm)
        fused = project(normed, layer.qkv, layer.qkv_bias).contiguous()
        fused = fused.view(len(hidden), -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = fused[:, : config.num_heads], fused[:, config.num_heads : -config.num_kv_heads]
            query.copy_(self._norm(query, layer.query_norm))
            key.copy_(self._norm(key, layer.key_norm))
        rotation.apply_(fused[:, : config.num_heads + config.num_kv_heads])
        query = fused[:, : config.num_heads]
        key_value = fused[:, config.num_heads :].view(len(hidden), 2, config.num_kv_heads, -1)
        return project(plan.attend(index, query, key_value), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, layer.post_norm)
        if layer.router is not None and self.config.experts is not None:
            return run_experts(self.config.experts, normed, layer.router, layer.gate_up, layer.down)
        fused = project(normed, layer.gate_up, layer.gate_up_bias)
        gate, up = fused.chunk(2, dim=-1)
        return project((silu(gate) * up).contiguous(), layer.down, layer.down_bias)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        exact = hidden.float()
        scale = exact.square().mean(-1, keepdim=True).add_(self.config.rms_norm_eps).rsqrt_()
        return (exact * scale).to(hidden.dtype).mul_(weight)

    def _logits(self, hidden: Tensor) -> Tensor:
        norm, head = self._weights.norm, self._weights.lm_head
        assert norm is not None
        assert head is not None
        logits = project(self._norm(hidden, norm), head, None)
        return logits.contiguous() if self.dtype == torch.float64 else logits.float().contiguous()
