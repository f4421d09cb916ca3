"""Answers of meshes on GPUs against `transformers` in bfloat16 on the same GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import running_mesh

NEAR_STEPS = 2  # of bfloat16, between the two best logits of the reference
SLACK = 2e-3  # of the tokens: how many more than the reference rounded to bfloat16 takes may be unlike float32's


@dataclass(frozen=True, slots=True)
class Shape:
    """Stages of a mesh, whether decode's steps are graphs, and what carries the KV."""

    prefill: int
    decode: int
    graphs: bool = True
    transfer: str = "mooncake"


SHAPES = [Shape(1, 1), Shape(2, 2), Shape(2, 1), Shape(1, 2), Shape(2, 2, graphs=False)]


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of an answer, or of many: those up to the reference's first near tie, how many of them are `equal`, and
    how many after that are not, though the reference has no near tie there. `widest`: of all that are not equal, the
    widest gap between the two best, in steps of bfloat16."""

    ahead: int = 0
    equal: int = 0
    after: int = 0
    widest: float = 0.0

    def __add__(self, other: Compared) -> Compared:
        widest = max(self.widest, other.widest)
        return Compared(self.ahead + other.ahead, self.equal + other.equal, self.after + other.after, widest)


def compare(model: Any, prompt: Sequence[int], made: Sequence[int]) -> Compared:
    """The reference is given what was made so far, so that it has a word on every token."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *made]], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    values, ids = logits.topk(2, dim=-1)
    step = 2.0 ** (values[:, 0].abs().log2().floor() - 7)
    gaps = ((values[:, 0] - values[:, 1]) / step).cpu().numpy()
    is_near = gaps <= NEAR_STEPS
    is_equal = ids[:, 0].cpu().numpy() == np.array(made)
    ahead = int(is_near.argmax()) if is_near.any() else len(made)
    widest = float(gaps[~is_equal].max(initial=0.0))
    return Compared(ahead, int(is_equal[:ahead].sum()), int((~is_equal & ~is_near)[ahead:].sum()), widest)


def gpus(stages: int, first: int) -> str:
    count = torch.cuda.device_count()
    return ",".join(str((first + rank) % count) for rank in range(stages))


async def ask_all(router: str, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    async with Client(router, GENERATOR) as client, asyncio.TaskGroup() as group:
        requests = [token_request(prompt, new_tokens, ignore_eos=True) for prompt in prompts]
        tasks = [group.create_task(generate(client, request, timeout_s=60)) for request in requests]
    return [task.result() for task in tasks]


def ask_mesh(tmp_path: Path, shape: Shape, model: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    """`new` greedy tokens for each of the prompts, which are all asked at once."""
    options = ["--device=cuda", f"--model={model}", "--max-running=64", "--chunk-size=2048", "--num-pages=4096"]
    options += [f"--prefill-pp={shape.prefill}", f"--decode-pp={shape.decode}", f"--transfer={shape.transfer}"]
    options += [f"--prefill-gpus={gpus(shape.prefill, 0)}", f"--decode-gpus={gpus(shape.decode, 1)}"]
    environ = {"STAGEMESH_ENGINE__CUDA_GRAPHS": str(shape.graphs).lower()}
    with running_mesh(tmp_path, *options, environ=environ) as mesh:

        async def ask() -> list[Answer]:
            answers = await ask_all(mesh.router, prompts, new)
            await mesh.check_idle()
            return answers

        answers = asyncio.run(ask())
    assert all(len(answer.token_ids) == new for answer in answers)
    return [answer.token_ids for answer in answers]


def compare_all(model: Any, prompts: list[list[int]], answers: list[list[int]], what: str) -> Compared:
    """Tells it, too."""
    pairs = zip(prompts, answers, strict=True)
    compared = sum((compare(model, prompt, made) for prompt, made in pairs), Compared())
    rest = sum(map(len, answers)) - compared.ahead
    print(
        f"{what}: {compared.equal} of {compared.ahead} tokens up to the first near tie are equal; of the {rest} after "
        f"it, {compared.after} differ with no near tie; what differs is {compared.widest:.1f} steps apart at most"
    )
    return compared


def check_likeliest(path: Path, prompts: list[list[int]], answers: list[list[int]], what: str) -> None:
    """Of a model whose logits are flat, so that bfloat16 alone turns some tokens over: ours may not be off float32 by
    more than `transformers` in bfloat16 is."""
    from transformers import AutoModelForCausalLM

    rounded, exact = (
        AutoModelForCausalLM.from_pretrained(path, dtype=d).cuda() for d in (torch.bfloat16, torch.float32)
    )
    compare_all(rounded, prompts, answers, f"{what} against transformers in bfloat16")
    ours = _unequal(exact, prompts, answers, answers)
    theirs = _unequal(
        exact, prompts, answers, [_likeliest(rounded, p, a) for p, a in zip(prompts, answers, strict=True)]
    )
    count = sum(map(len, answers))
    print(f"  not float32's likeliest: {ours} of ours, {theirs} of transformers', of {count}")
    assert ours <= theirs + SLACK * count


def _likeliest(model: Any, prompt: list[int], made: list[int]) -> list[int]:
    """What `model` takes for each place of `made`, given all before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *made]], device="cuda")).logits[0, len(prompt) - 1 : -1]
    ids: list[int] = logits.argmax(dim=-1).tolist()
    return ids


def _unequal(exact: Any, prompts: list[list[int]], made: list[list[int]], chosen: list[list[int]]) -> int:
    """How many of `chosen`, a token for each of `made`, are not what `exact` takes there."""
    wanted = [_likeliest(exact, prompt, answer) for prompt, answer in zip(prompts, made, strict=True)]
    return sum(a != b for one, other in zip(wanted, chosen, strict=True) for a, b in zip(one, other, strict=True))
