"""Greedy answers of a mesh with random weights. Their logits are flat, so that bfloat16 alone turns some tokens over,
the reference's as well. So both are held against float32: ours may not be off more than `transformers` in bfloat16 is.
`check_smollm2` has trained weights, and asks for the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.answers import Shape, ask_mesh, compare_all
from tests.gpu.models import random_mistral

NUM_PROMPTS, NEW_TOKENS = 64, 64
SLACK = 8  # tokens, of 4,096


def draw_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 15, 16, 17, *rng.integers(3, 600, NUM_PROMPTS - 5).tolist()]
    return [rng.integers(3, 4000, length).tolist() for length in lengths]


def likeliest(model: Any, prompt: list[int], made: list[int]) -> list[int]:
    """What `model` takes for each place of `made`, given all before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *made]], device="cuda")).logits[0, len(prompt) - 1 : -1]
    ids: list[int] = logits.argmax(dim=-1).tolist()
    return ids


@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(2, 1)], ids=str)  # check_smollm2 has them all
def test_a_mesh_is_no_further_from_float32_than_the_reference(tmp_path: Path, shape: Shape) -> None:
    from transformers import AutoModelForCausalLM

    path, prompts = random_mistral(tmp_path / "model"), draw_prompts()
    rounded, exact = (
        AutoModelForCausalLM.from_pretrained(path, dtype=d).cuda() for d in (torch.bfloat16, torch.float32)
    )
    answers = ask_mesh(tmp_path, shape, path, prompts, NEW_TOKENS)
    compare_all(rounded, prompts, answers, f"{shape} against transformers in bfloat16")
    ours = unequal(exact, prompts, answers, answers)
    theirs = unequal(exact, prompts, answers, [likeliest(rounded, p, a) for p, a in zip(prompts, answers, strict=True)])
    print(f"  not float32's likeliest: {ours} of ours, {theirs} of transformers', of {NUM_PROMPTS * NEW_TOKENS}")
    assert ours <= theirs + SLACK


def unequal(exact: Any, prompts: list[list[int]], made: list[list[int]], chosen: list[list[int]]) -> int:
    """How many of `chosen`, a token for each of `made`, are not what `exact` takes there."""
    wanted = [likeliest(exact, prompt, answer) for prompt, answer in zip(prompts, made, strict=True)]
    return sum(a != b for one, other in zip(wanted, chosen, strict=True) for a, b in zip(one, other, strict=True))
