"""PLACEHOLDER by the founder until the sampler is written: overwrite me."""
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    temperature: float
    top_k: int
    top_p: float
    seed: int


def sample(logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    return logits.argmax(-1)
