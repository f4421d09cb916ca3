"""Random weights for tests and benchmarks: each tensor depends on the seed and its name alone, so every split of a
model into stages, in every dtype, has the same ones. Those made on a GPU are others than those made on the CPU: a model
of billions is made in seconds there."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from stagemesh.shared.model.weights import Shape


class DummyReader:
    """Norms are 1; all else is normal noise that keeps the scale of activations; see `TensorReader`."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self._seed, self._device = seed, device

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=self._device)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.randn(shape, generator=generator, device=self._device).mul_(shape[-1] ** -0.5).to(dtype)
