"""Greedy answers of a mesh with random weights. Their logits are flat, so that bfloat16 alone turns some tokens over,
the reference's as well. So both are held against float32: ours may not be off more than `transformers` in bfloat16 is.
`check_smollm2` has trained weights, and asks for the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.gpu.answers import Shape, ask_mesh, check_likeliest
from tests.gpu.models import random_mistral

NUM_PROMPTS, NEW_TOKENS = 64, 64


def draw_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 15, 16, 17, *rng.integers(3, 600, NUM_PROMPTS - 5).tolist()]
    return [rng.integers(3, 4000, length).tolist() for length in lengths]


@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(2, 1)], ids=str)  # check_smollm2 has them all
def test_a_mesh_is_no_further_from_float32_than_the_reference(tmp_path: Path, shape: Shape) -> None:
    path, prompts = random_mistral(tmp_path / "model"), draw_prompts()
    answers = ask_mesh(tmp_path, shape, path, prompts, NEW_TOKENS)
    check_likeliest(path, prompts, answers, str(shape))
