"""Shared prefixes with a real model on two stages: the same tokens as for prompts that are computed whole (float64)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import Command
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import split_layers
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import ModelSource, open_model
from tests.support.tiny_models import Architecture, make_tiny

PAGE, CHUNK, NUM_PAGES, NUM_STAGES = 4, 24, 40, 2


class Instance:
    """A prefill instance in one process: its scheduler and its stages. Prompts go nowhere."""

    def __init__(self, source: ModelSource, *, prefix_cache: bool) -> None:
        self.scheduler = PrefillScheduler(
            num_pages=NUM_PAGES,
            page_size=PAGE,
            pp_size=NUM_STAGES,
            chunk_size=CHUNK,
            max_sequences=4,
            reserve_ahead=2,
            prefix_cache=prefix_cache,
        )
        self._stages = []
        ranges = split_layers(source.config.num_layers, NUM_STAGES)
        for layers in ranges:
            first, last = layers == ranges[0], layers == ranges[-1]
            weights = source.load(layers, torch.float64, first=first, last=last)
            model = StageModel(source.config, layers, weights, torch.float64, first=first, last=last)
            pool = allocate_pool(source.config, len(layers), NUM_PAGES, PAGE, torch.float64).fill_(7.0)
            self._stages.append(StageRunner(model, pool, first=first, last=last))

    def run(self, prompts: Sequence[list[int]], burst: int) -> list[int]:
        """The first token after each prompt. `burst` of them come at a time."""
        made: dict[int, int] = {}
        for at, prompt in enumerate(prompts):
            tokens = np.array(prompt, dtype=np.int64)
            self.scheduler.submit(RequestRef(str(at), 0), SamplingParams(max_tokens=1), tokens, "")
            if at % burst == burst - 1:
                self._run_dry(made)
        self._run_dry(made)
        assert not any(self.scheduler.held.values())
        return [made[at] for at in range(len(prompts))]

    def _run_dry(self, made: dict[int, int]) -> None:
        while True:
            actions = self.scheduler.poll()
            self.scheduler.check_integrity()
            made |= {int(output.request.request_id): output.token_ids[0] for output in actions.outputs}
            if not actions.commands:
                return
            for command in actions.commands:
                self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        hidden = None
        for stage in self._stages:
            stage.apply(command)
            if command.step is not None:
                hidden = stage.run(command.step, hidden=hidden, sampled={}).tensor
        if command.step is None:
            self.scheduler.applied(command.number)
        else:
            assert hidden is not None
            self.scheduler.result(command.step.number, hidden.numpy())


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Beginnings of three texts, of any length, with up to ten tokens of their own."""
    texts = [[rng.randrange(4, 320) for _ in range(60)] for _ in range(3)]
    chosen = [rng.choice(texts)[: rng.randint(0, 60)] for _ in range(count)]
    return [begin + [rng.randrange(4, 320) for _ in range(rng.randint(not begin, 10))] for begin in chosen]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    architecture: Architecture = request.param
    torch.set_num_threads(1)
    window: dict[str, Any] = {"sliding_window": 10} if architecture == "mistral" else {}
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model", architecture, num_layers=3, **window)
    return open_model(str(path))


@pytest.mark.parametrize("burst", [1, 5, 40])
def test_tokens_are_those_of_prompts_that_are_computed_whole(source: ModelSource, burst: int) -> None:
    prompts = prompts_of(random.Random(burst), 40)
    cached, whole = Instance(source, prefix_cache=True), Instance(source, prefix_cache=False)
    assert cached.run(prompts, burst) == whole.run(prompts, burst)
    stats = cached.scheduler.stats
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.cached_tokens > 0.3 * stats.prompt_tokens
    assert whole.scheduler.stats.cached_tokens == 0
    assert cached.scheduler.evicted_pages > 0
