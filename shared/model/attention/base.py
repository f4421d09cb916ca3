"""What a stage asks of attention: one plan a forward pass, then one call a layer. Backends stand beside this file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stagemesh.shared.model.batch import ForwardBatch


class AttentionPlan(Protocol):
    """The indices and masks of one forward pass, the same for every layer."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Writes `key_value` [T, 2, kv_heads, head_dim] into the pool's layer `layer` (counted from the stage's
        first), then attends with `query` [T, heads, head_dim]: a row may see what another row of the same step writes.
        Returns [T, heads * head_dim]."""
        ...


class Attention(Protocol):
    """Causal attention over a pool [num_pages, stage_layers, 2, page_size, kv_heads, head_dim]."""

    def plan(self, batch: ForwardBatch, pool: Tensor) -> AttentionPlan:
        """Prepares a forward pass over `batch`."""
        ...
