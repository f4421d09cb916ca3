"""A sequence whose grammar gives no masks any more ends with its reason, and costs its stage nothing: its next step is
out by the time that it is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import EMPTY, FROM_STEP, SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams, Structure
from stagemesh.shared.engine import grammar
from stagemesh.shared.engine.grammar import Grammars
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.vocabulary import compile_structure
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import open_model
from stagemesh.shared.stage.structures import vocabulary_of
from tests.support.tiny_models import make_tiny

WORD = Structure("regex", "[a-z]{30,90}")


@pytest.fixture
def runner(tmp_path: Path) -> StageRunner:
    source = open_model(str(make_tiny(tmp_path / "model", num_layers=2)))
    layers = LayerRange(0, source.config.num_layers)
    weights = source.load(layers, torch.float64, first=True, last=True)
    model = StageModel(source.config, layers, weights, torch.float64, first=True, last=True)
    pool = allocate_pool(source.config, len(layers), 16, 4, torch.float64)
    made = StageRunner(model, pool, first=True, last=True)
    made.grammars = Grammars(vocabulary_of(str(tmp_path / "model")))
    return made


def step(number: int) -> Step:
    """The first runs a token of prefill's on both sequences, the others what the step before has drawn."""
    first = number == 1
    flags = SAMPLE if first else SAMPLE | FROM_STEP
    rows = [(handle, 2 + number, 1, 0 if first else number - 1, handle - 1, flags) for handle in (1, 2)]
    return Step(number, 0, np.array(rows), np.array([50, 50]) if first else EMPTY)


@pytest.mark.parametrize("why", ["its masks take too long", "has not been prepared here"])
def test_the_steps_after_a_failure_run(runner: StageRunner, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    assert runner.grammars is not None
    if why.startswith("its masks"):
        runner.grammars.take(WORD, compile_structure(runner.grammars.vocabulary, WORD), 1)
        monkeypatch.setattr(grammar, "FREE_NS", 0)
        monkeypatch.setattr(grammar, "TOKEN_NS", 0)
    else:
        runner.grammars = None
    joins = (
        Join(1, RequestRef("strict", 1), SamplingParams(max_tokens=20, structure=WORD), None, 3),
        Join(2, RequestRef("free", 1), SamplingParams(max_tokens=20), None, 3),
    )
    runner.apply(Command(1, joins=joins, page_deltas=pack_deltas({1: [0, 1, 2], 2: [3, 4, 5]})))
    ids = runner.run(step(1), hidden=None, sampled={}).tensor.numpy()
    for number in (2, 3):
        made = runner.run(step(number), hidden=None, sampled={number - 1: ids})
        assert f"regex: {why}" in made.logprobs[0].failure
        assert 1 not in made.logprobs
        ids = made.tensor.numpy()
        assert ids[1] >= 0
