"""Greedy answers of a mesh with random weights: the same tokens as the reference's up to the first near tie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.answers import SHAPES, Shape, check_mesh
from tests.gpu.models import random_mistral

NUM_PROMPTS, NEW_TOKENS = 64, 64
MOST_AFTER = 8  # of some thousand, three or four steps apart: random weights leave more such pairs than trained ones


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 15, 16, 17, *rng.integers(3, 600, NUM_PROMPTS - 5).tolist()]
    return [rng.integers(3, 4000, length).tolist() for length in lengths]


@pytest.mark.parametrize("shape", [*SHAPES, Shape(2, 2, transfer="nixl")], ids=str)
def test_a_mesh_gives_the_tokens_of_the_reference(tmp_path: Path, shape: Shape) -> None:
    from transformers import AutoModelForCausalLM

    path = random_mistral(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()
    compared = check_mesh(tmp_path, shape, path, reference, prompts(), NEW_TOKENS)
    assert compared.after <= MOST_AFTER
