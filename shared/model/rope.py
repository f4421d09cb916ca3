"""Rotary position embedding, in the numerics of the reference implementation: angles in float32 whatever the dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stagemesh.shared.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [head_dim / 2], radians a token."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    return plain if config.rope_scaling is None else _scaled(plain, config.rope_scaling, config)


def attention_factor(config: ModelConfig) -> float:
    """What rotated queries and keys are multiplied with."""
    return 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor


def _scaled(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors)
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, config)
    # llama3: long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1 model card).
    turns = scaling.original_max_context * plain / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Frequencies that turn often in the original context are kept, those that turn seldom divided, those between
    blended by their place (Peng et al. 2023, "YaRN", section 3.2)."""

    def place(turns: float) -> float:
        """The frequency, counted from the fastest, that turns so often."""
        share = scaling.original_max_context / (turns * 2 * math.pi)
        return config.head_dim * math.log(share) / (2 * math.log(config.rope_theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


class Rotation:
    """The rotation of each token of a step: the same for every layer. Halves of a head are the pairs. `factor`
    multiplies what is rotated."""

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        angles = positions[:, None].float() * frequencies
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        self._cos = torch.cat((cos, cos), dim=-1)[:, None]
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None]

    def apply_(self, heads: Tensor) -> None:
        """Rotates `heads` [T, n, head_dim] in place."""
        first, second = heads.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        heads.mul_(self._cos).add_(swapped.mul_(self._sin))
