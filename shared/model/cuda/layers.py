"""The layers of one stage on a GPU: the matrices by cuBLAS, attention, norms and activation by flashinfer, the rest by
our own kernels. The same weights and pool layout as on the CPU; sums and angles in float32, results in the stage's
dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer.activation import silu_and_mul
from flashinfer.norm import fused_add_rmsnorm, rmsnorm
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.cuda.kernels import embed, rope_append
from stagemesh.shared.model.rope import attention_factor, inverse_frequencies
from stagemesh.shared.model.weights import LayerWeights, StageWeights

Attend = Callable[[int, Tensor], Tensor]
"""(layer of the stage, queries [T, heads, head_dim]) -> [T, heads, head_dim]; keys and values are in the pool."""


class CudaStageModel:
    """Layers `layers` on the current device; see `StageModel`, its twin on the CPU."""

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
        self.config, self.layers, self.dtype, self.first, self.last = config, layers, dtype, first, last
        self.weights = weights
        positions = torch.arange(config.max_context, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(config)
        factor = attention_factor(config)
        self._cos, self._sin = (angles.cos() * factor).cuda(), (angles.sin() * factor).cuda()

    def embed(self, sources: Tensor, literals: Tensor, sampled: Tensor, out: Tensor) -> Tensor:
        """`out` [T, hidden] of ids that are literal or that a step has sampled; see `kernels.embed`."""
        assert self.weights.embedding is not None
        return embed(sources, literals, sampled, self.weights.embedding, out)

    def run_layers(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, pool: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """All layers over `hidden` [T, hidden], which is overwritten. Returns it and what is still to be added to it,
        if anything is, so that the last addition can be part of a norm."""
        config, eps = self.config, self.config.rms_norm_eps
        delta: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            if delta is None:
                normed = rmsnorm(hidden, layer.input_norm, eps)
            else:
                fused_add_rmsnorm(delta, hidden, layer.input_norm, eps)
                normed = delta
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            if layer.query_norm is not None:
                self._norm_heads(qkv, layer)
            query = rope_append(qkv, self._cos, self._sin, positions, slots, pool[:, index], config.num_heads)
            attended = attend(index, query).view(len(hidden), -1)
            delta = linear(attended, layer.output, layer.output_bias)
            fused_add_rmsnorm(delta, hidden, layer.post_norm, eps)
            delta = _mlp(delta, layer)
        return hidden, delta

    def _norm_heads(self, qkv: Tensor, layer: LayerWeights) -> None:
        """Of queries and keys, in place."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        query, key = heads[:, : config.num_heads], heads[:, config.num_heads : -config.num_kv_heads]
        query.copy_(rms_norm(query, (config.head_dim,), layer.query_norm, config.rms_norm_eps))
        key.copy_(rms_norm(key, (config.head_dim,), layer.key_norm, config.rms_norm_eps))

    def logits(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """[R, vocab] in the stage's dtype, of rows [R, hidden] of what `run_layers` returned; both are overwritten."""
        assert self.weights.norm is not None
        assert self.weights.lm_head is not None
        if delta is None:
            delta = rmsnorm(hidden, self.weights.norm, self.config.rms_norm_eps)
        else:
            fused_add_rmsnorm(delta, hidden, self.weights.norm, self.config.rms_norm_eps)
        return linear(delta, self.weights.lm_head)


def _mlp(normed: Tensor, layer: LayerWeights) -> Tensor:
    gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
    return linear(silu_and_mul(gate_up), layer.down, layer.down_bias)
