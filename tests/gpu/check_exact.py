"""Greedy answers of meshes on GPUs against `transformers` in bfloat16 on the same GPU: the same tokens up to the first
near tie, where the two best logits of the reference are within two steps of bfloat16."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.shared.rpc.client import Client
from tests.gpu.models import random_mistral
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import running_mesh

NUM_PROMPTS, NEW_TOKENS = 64, 64
NEAR_STEPS = 2
MOST_AFTER = 8  # of some thousand, three or four steps apart: random weights leave more such pairs than a trained model
SHAPES = [(1, 1, True), (2, 2, True), (2, 1, True), (1, 2, True), (2, 2, False)]


def gpus(stages: int, first: int) -> str:
    count = torch.cuda.device_count()
    return ",".join(str((first + rank) % count) for rank in range(stages))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 15, 16, 17, *rng.integers(3, 600, NUM_PROMPTS - 5).tolist()]
    return [rng.integers(3, 4000, length).tolist() for length in lengths]


async def ask_all(router: str, wanted: list[list[int]]) -> list[Answer]:
    async with Client(router, GENERATOR) as client, asyncio.TaskGroup() as group:
        requests = [token_request(prompt, NEW_TOKENS, ignore_eos=True) for prompt in wanted]
        tasks = [group.create_task(generate(client, request, timeout_s=60)) for request in requests]
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of one answer: `equal` to the reference's up to its first near tie, `ahead` of them in all, and `after`
    that, those that are not the reference's though it has no near tie."""

    equal: int
    ahead: int
    after: int


def compare(model: Any, prompt: Sequence[int], made: Sequence[int]) -> Compared:
    """The reference is given what was made so far, so that it has a word on every token."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *made]], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    values, ids = logits.topk(2, dim=-1)
    step = 2.0 ** (values[:, 0].abs().log2().floor() - 7)
    is_near = ((values[:, 0] - values[:, 1]) / step <= NEAR_STEPS).cpu().numpy()
    is_equal = ids[:, 0].cpu().numpy() == np.array(made)
    ahead = int(is_near.argmax()) if is_near.any() else len(made)
    return Compared(int(is_equal[:ahead].sum()), ahead, int((~is_equal & ~is_near)[ahead:].sum()))


@pytest.mark.parametrize(("prefill", "decode", "graphs"), SHAPES)
def test_a_mesh_gives_the_tokens_of_the_reference(tmp_path: Path, prefill: int, decode: int, graphs: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = random_mistral(tmp_path / "model")
    options = ["--device=cuda", f"--model={path}", "--max-running=64", "--chunk-size=2048", "--num-pages=4096"]
    options += [f"--prefill-pp={prefill}", f"--decode-pp={decode}"]
    options += [f"--prefill-gpus={gpus(prefill, 0)}", f"--decode-gpus={gpus(decode, 1)}"]
    environ = {"STAGEMESH_ENGINE__CUDA_GRAPHS": str(graphs).lower()}
    wanted = prompts()
    with running_mesh(tmp_path, *options, environ=environ) as mesh:

        async def ask() -> list[Answer]:
            answers = await ask_all(mesh.router, wanted)
            await mesh.check_idle()
            return answers

        answers = asyncio.run(ask())
    assert all(len(answer.token_ids) == NEW_TOKENS for answer in answers)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()
    seen = [compare(reference, p, a.token_ids) for p, a in zip(wanted, answers, strict=True)]
    equal, ahead, after = (sum(getattr(each, name) for each in seen) for name in ("equal", "ahead", "after"))
    print(
        f"PP{prefill} + PP{decode}, graphs {graphs}: {equal} of {ahead} tokens up to the first near tie are equal; of "
        f"the {NUM_PROMPTS * NEW_TOKENS - ahead} after it, {after} differ where there is no near tie"
    )
    assert equal == ahead
    assert after <= MOST_AFTER
