"""Greedy output of a mesh of any shape is the reference's, token for token, in float64."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.reference import check_greedy
from tests.support.reference import load_reference as load_reference
from tests.support.running import running_mesh
from tests.support.tiny_models import Architecture, make_tiny

PAGE, CHUNK, NEW_TOKENS = 8, 32, 24
NUM_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """How many stages on each side; layers a stage, or even."""

    prefill: int
    decode: int
    prefill_layers: str = ""
    decode_layers: str = ""

    @property
    def options(self) -> list[str]:
        options = ["--prefill-pp", str(self.prefill), "--decode-pp", str(self.decode)]
        options += ["--prefill-layers", self.prefill_layers] if self.prefill_layers else []
        return options + (["--decode-layers", self.decode_layers] if self.decode_layers else [])

    def __str__(self) -> str:
        sides = ((self.prefill, self.prefill_layers), (self.decode, self.decode_layers))
        return "->".join(f"{pp}({layers})" if layers else str(pp) for pp, layers in sides)


EVEN = [Shape(*pair) for pair in ((1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (4, 1), (1, 4))]
UNEVEN = [
    Shape(2, 2, "3,5", "6,2"),
    Shape(1, 2, "", "1,7"),
    Shape(2, 1, "7,1", ""),
    Shape(3, 2, "1,5,2", "3,5"),
    Shape(2, 3, "5,3", "2,1,5"),
    Shape(4, 1, "1,1,5,1", ""),
    Shape(1, 4, "", "4,1,2,1"),
]
SAMPLE: list[tuple[Architecture, Shape]] = [
    ("llama", EVEN[1]),
    ("mistral", UNEVEN[3]),
    ("llama", UNEVEN[6]),
]
FAMILIES: list[tuple[Architecture, Shape]] = [("qwen3_moe", UNEVEN[0]), ("qwen2", EVEN[2]), ("mixtral", EVEN[3])]
ALL: list[tuple[Architecture, Shape]] = [(a, s) for a in ("llama", "mistral") for s in (*EVEN, *UNEVEN)]


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Lengths around multiples of page and chunk, from 1 up, and some in between."""
    rng = random.Random(7)
    edges = [n + d for n in (PAGE, 2 * PAGE, CHUNK, 2 * CHUNK, 3 * CHUNK, 5 * CHUNK) for d in (-1, 0, 1)]
    lengths = [1, 2, 3, *edges]
    lengths = [lengths[i] if i < len(lengths) else rng.choice([*edges, rng.randint(1, 200)]) for i in range(count)]
    return [[rng.randrange(4, vocab_size) for _ in range(length)] for length in lengths]


async def ask_all(router: str, wanted: list[list[int]]) -> list[Answer]:
    async with Client(router, GENERATOR) as client, asyncio.TaskGroup() as group:
        requests = [token_request(prompt, NEW_TOKENS, ignore_eos=True) for prompt in wanted]
        tasks = [group.create_task(generate(client, request)) for request in requests]
    return [task.result() for task in tasks]


def run_shape(
    tmp_path: Path, architecture: Architecture, shape: Shape, count: int, options: Sequence[str] = ()
) -> None:
    model = make_tiny(tmp_path / "model", architecture, num_layers=NUM_LAYERS, max_context=256)
    torch.set_num_threads(2)
    reference = load_reference(model)
    wanted = prompts(count, reference.config.vocab_size)
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "400", "--max-running", "16"]
    with running_mesh(tmp_path, "--model", str(model), "--dtype", "float64", *sizes, *shape.options, *options) as mesh:
        answers = asyncio.run(ask_all(mesh.router, wanted))
        asyncio.run(mesh.check_idle())
    compared = [check_greedy(reference, prompt, a.token_ids) for prompt, a in zip(wanted, answers, strict=True)]
    for prompt, answer in zip(wanted, answers, strict=True):
        assert answer.finished is not None
        assert answer.reason == "length"
        assert len(answer.token_ids) == answer.finished.usage.completion_tokens == NEW_TOKENS
        assert answer.finished.usage.prompt_tokens == len(prompt)
    assert sum(compared) > 0.9 * NEW_TOKENS * count, "near ties everywhere: the comparison says nothing"
    said = f"{sum(compared)} of {count * NEW_TOKENS} tokens compared, all equal"
    print(f"{architecture} {shape}: {count} prompts, {said}")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "shape"), SAMPLE, ids=str)
def test_a_sample_of_shapes_gives_the_tokens_of_the_reference(
    tmp_path: Path, architecture: Architecture, shape: Shape
) -> None:
    run_shape(tmp_path, architecture, shape, count=40)


@pytest.mark.slow
def test_experts_and_norms_of_heads_over_a_mesh(tmp_path: Path) -> None:
    run_shape(tmp_path, *FAMILIES[0], count=24)


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "shape"), FAMILIES[1:], ids=str)
def test_other_families_over_a_mesh(tmp_path: Path, architecture: Architecture, shape: Shape) -> None:
    run_shape(tmp_path, architecture, shape, count=40)


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "shape"), ALL, ids=str)
def test_every_shape_gives_the_tokens_of_the_reference(
    tmp_path: Path, architecture: Architecture, shape: Shape
) -> None:
    run_shape(tmp_path, architecture, shape, count=200)
