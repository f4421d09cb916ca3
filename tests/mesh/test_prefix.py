"""Prompts with a beginning in common: computed once, sent whole, answered as if nothing were shared."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.shared.model.source import open_model
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, PAGE, ask_all, load_reference
from tests.mesh.test_smollm2 import packaged_gguf
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.reference import check_greedy, check_greedy_family
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import Scrape, scrape_after
from tests.support.tiny_models import make_tiny

SIZES = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--max-running", "16"]


def usage_of(answer: Answer) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    assert answer.finished is not None
    return answer.finished.usage.prompt_tokens, answer.finished.usage.cached_tokens


def shared_prompts(rng: random.Random, *, texts: int, each: int, common: int, vocab_size: int) -> list[list[list[int]]]:
    """For each text its prompts: `common` tokens and a few of their own."""
    begins = [[rng.randrange(4, vocab_size) for _ in range(common)] for _ in range(texts)]
    return [
        [[*begin, *(rng.randrange(4, vocab_size) for _ in range(rng.randint(1, 20)))] for _ in range(each)]
        for begin in begins
    ]


def check_all(reference: Any, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> None:
    """Every answer is the reference's."""
    compared = [check_greedy(reference, p, a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    total = sum(len(answer.token_ids) for answer in answers)
    print(f"{len(prompts)} prompts, {sum(compared)} of {total} tokens compared, all equal")
    assert sum(compared) > 0.7 * total, "near ties everywhere: the comparison says nothing"


async def scrape(mesh: RunningMesh, head: str) -> Scrape:
    address = (await mesh.check())[head].metrics_address
    return await scrape_after(address, time.time())


@pytest.mark.slow
def test_prompts_at_once_share_what_they_have_in_common_and_get_the_tokens_of_the_reference(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_layers=6, max_context=256)
    reference = load_reference(model)
    common = 60
    groups = shared_prompts(random.Random(3), texts=4, each=6, common=common, vocab_size=320)
    prompts = [prompt for of_all_texts in zip(*groups, strict=True) for prompt in of_all_texts]
    with running_mesh(tmp_path, "--model", str(model), "--dtype", "float64", "--num-pages", "400", *SIZES) as mesh:
        answers = asyncio.run(ask_all(mesh.router, prompts))
        asyncio.run(mesh.check_idle())
        kept = asyncio.run(mesh.check())["prefill-0/0"].gauges["pages_cached"]
        again = asyncio.run(ask_all(mesh.router, prompts))
        asyncio.run(mesh.check_idle())
    check_all(reference, prompts, answers)
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]
    cached = [usage_of(answer)[1] for answer in answers]
    for text in range(4):  # they came text by text, in turn: one of each computes what they have in common
        assert sorted(cached[text::4]) == [0, *[common // PAGE * PAGE] * 5]
    assert kept == sum(common // PAGE for _ in groups) + sum(
        len(prompt) // PAGE - common // PAGE for group in groups for prompt in group
    )
    for prompt, answer in zip(prompts, again, strict=True):
        assert usage_of(answer) == (len(prompt), (len(prompt) - 1) // PAGE * PAGE)


@pytest.mark.slow
def test_a_cache_that_is_too_small_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    """Pools for four prompts at a time, six texts in turn, two prefill instances, with and without a ticket."""
    model = make_tiny(tmp_path / "model", num_layers=4, max_context=256)
    reference = load_reference(model)
    groups = shared_prompts(random.Random(4), texts=6, each=8, common=70, vocab_size=320)
    prompts = [prompt for of_all_texts in zip(*groups, strict=True) for prompt in of_all_texts]
    options = ["--prefill-instances", "2", "--prefill-pp", "2", "--decode-pp", "1", "--num-pages", "40"]

    async def ask(router: str) -> list[Answer]:
        async with Client(router, GENERATOR) as client, asyncio.TaskGroup() as group:
            requests = [token_request(p, 1 if n % 5 == 0 else 8, ignore_eos=True) for n, p in enumerate(prompts)]
            tasks = [group.create_task(generate(client, request)) for request in requests]
        return [task.result() for task in tasks]

    with running_mesh(tmp_path, "--model", str(model), "--dtype", "float64", *options, *SIZES) as mesh:
        answers = asyncio.run(ask(mesh.router))
        asyncio.run(mesh.check_idle())
        found = [asyncio.run(scrape(mesh, head)) for head in ("prefill-0/0", "prefill-1/0")]
    check_all(reference, prompts, answers)
    cached = [usage_of(answer)[1] for answer in answers]
    assert sum(cached) > 0
    assert sum(head.value("prefill_tokens_total", how="cached") for head in found) == sum(cached)
    for head in found:
        states = head.of("pages", "state")
        assert states["used"] == states["quarantined"] == 0
        assert states["cached"] > 0
        assert sum(states.values()) == 40
        assert head.value("evicted_pages_total") > 0


@pytest.mark.full
def test_a_long_prompt_that_is_cached_is_answered_sooner(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    each, common = 8, 1000
    vocab_size = open_model("smollm2").config.vocab_size
    groups = shared_prompts(random.Random(5), texts=8, each=each, common=common, vocab_size=vocab_size)

    async def ask(router: str) -> list[list[Answer]]:
        async with Client(router, GENERATOR) as client:
            return [
                [await generate(client, token_request(prompt, 16, ignore_eos=True)) for prompt in group]
                for group in groups
            ]

    with running_mesh(tmp_path, "--model", "smollm2") as mesh:
        answers = asyncio.run(ask(mesh.router))
        asyncio.run(mesh.check_idle())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for prompts, given in zip(groups, answers, strict=True):
        for at, (prompt, answer) in enumerate(zip(prompts, given, strict=True)):
            assert answer.finished is not None
            assert usage_of(answer)[0] == len(prompt)
            assert usage_of(answer)[1] >= (0.8 * len(prompt) if at else 0)
            seconds[at > 0].append(answer.finished.timing.first_token_s)
    hit, miss = (sorted(seconds[was_there]) for was_there in (True, False))
    middle = [times[len(times) // 2] for times in (hit, miss)]
    said = f"of {len(hit)} hits {middle[0]:.3f} s, of {len(miss)} misses {middle[1]:.3f} s"
    print(f"median time to first token {said}")
    print(f"worst: {hit[-1]:.3f} s and {miss[-1]:.3f} s; ratio of the medians {middle[0] / middle[1]:.2f}")
    torch.set_num_threads(2)
    path = packaged_gguf()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    compared = sum(
        check_greedy_family(reference, prompts[0][:common], prompts, [answer.token_ids for answer in given])
        for prompts, given in zip(groups, answers, strict=True)
    )
    total = 16 * each * len(groups)
    print(f"{each * len(groups)} prompts, {compared} of {total} tokens compared, all equal")
    assert compared > 0.7 * total, "near ties everywhere: the comparison says nothing"
