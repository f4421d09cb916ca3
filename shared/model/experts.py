"""The MLP of a mixture of experts: each token goes through the experts that its router likes best."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from stagemesh.shared.model.config import Experts
from stagemesh.shared.model.project import project


def run_experts(experts: Experts, hidden: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`hidden` [T, hidden] through the chosen experts: [T, hidden]. router: [experts, hidden]; gate_up: [experts,
    2 * intermediate, hidden]; down: [experts, hidden, intermediate]. Probabilities are in float32, as the reference's.
    A token's sum is over its experts in their order, whoever else is in the batch."""
    shares = project(hidden, router, None).softmax(dim=-1, dtype=torch.float32)
    weights, chosen = shares.topk(experts.per_token, dim=-1)
    if experts.normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights.to(hidden.dtype)
    out = torch.zeros_like(hidden)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = project(hidden.index_select(0, tokens), gate_up[expert], None).chunk(2, dim=-1)
        done = project((silu(gate) * up).contiguous(), down[expert], None)
        out.index_add_(0, tokens, done * weights[tokens, places, None])
    return out
