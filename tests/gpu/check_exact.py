"""Greedy answers of a mesh with random weights. Their logits are flat: after four layers in bfloat16, ours and the
reference's are off by a few steps each, so one that differs must be nearly tied. `check_smollm2`: trained weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.answers import SHAPES, Shape, ask_mesh
from tests.gpu.models import random_mistral

NUM_PROMPTS, NEW_TOKENS = 64, 64
WIDEST = 4.0  # steps of bfloat16 between the reference's two best, where ours is not the best
MOST_UNEQUAL = 8  # that are more than two apart, of 4,096


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 15, 16, 17, *rng.integers(3, 600, NUM_PROMPTS - 5).tolist()]
    return [rng.integers(3, 4000, length).tolist() for length in lengths]


@pytest.mark.parametrize("shape", [*SHAPES, Shape(2, 2, transfer="nixl")], ids=str)
def test_a_mesh_gives_the_tokens_of_the_reference(tmp_path: Path, shape: Shape) -> None:
    from transformers import AutoModelForCausalLM

    path = random_mistral(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()
    compared = ask_mesh(tmp_path, shape, path, reference, prompts(), NEW_TOKENS)
    assert compared.ahead - compared.equal + compared.after <= MOST_UNEQUAL
    assert compared.widest <= WIDEST
