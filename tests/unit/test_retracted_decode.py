"""Sequences that are retracted and resumed on a stage with layers make the tokens that they would have made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import EMPTY, SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams, Structure
from stagemesh.shared.engine.grammar import Grammars
from stagemesh.shared.engine.host_copies import CopyDone, CpuPageCopier, Direction, HostCopies
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.vocabulary import compile_structure
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import open_model
from stagemesh.shared.stage.structures import vocabulary_of
from tests.support.tiny_models import make_tiny

LIMIT_S = 30.0
PAGE, NUM_PAGES = 4, 64
PLAIN = SamplingParams(max_tokens=8)
PENALISED = SamplingParams(
    max_tokens=8,
    temperature=0.9,
    seed=5,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias=((40, 1.5), (41, -2.0)),
)
STRUCTURED = SamplingParams(max_tokens=8, temperature=1.0, seed=5, structure=Structure("regex", "[a-z]{30,90}"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=2)


class Decoder:
    """Decodes sequences one by one or together on a stage that is all there is, in float64."""

    def __init__(self, path: Path, sampling: SamplingParams) -> None:
        self._sampling = sampling
        source = open_model(str(path))
        layers = LayerRange(0, source.config.num_layers)
        weights = source.load(layers, torch.float64, first=True, last=True)
        model = StageModel(source.config, layers, weights, torch.float64, first=True, last=True)
        pool = allocate_pool(source.config, len(layers), NUM_PAGES, PAGE, torch.float64)
        self.copies = HostCopies(CpuPageCopier(pool), 1 << 30)
        self.done: SimpleQueue[CopyDone] = SimpleQueue()
        self.copies.listen(self.done.put)
        self._runner = StageRunner(model, pool, first=True, last=True, copies=self.copies)
        if sampling.structure is not None:
            self._runner.grammars = grammars = Grammars(vocabulary_of(str(path)))
            grammars.take(sampling.structure, compile_structure(grammars.vocabulary, sampling.structure), 1)
        self._free = list(range(NUM_PAGES))
        self._number = 0
        self.tokens: dict[int, list[int]] = {}

    def apply(self, *, joins: Sequence[int] = (), pages: dict[int, int] | None = None, **lists: Any) -> None:
        """`pages` are counts of new ones by handle."""
        self._number += 1
        taken = {handle: [self._free.pop() for _ in range(count)] for handle, count in (pages or {}).items()}
        joining = tuple(self._join(handle) for handle in joins)
        self._runner.apply(Command(self._number, joins=joining, page_deltas=pack_deltas(taken), **lists))

    def _join(self, handle: int) -> Join:
        prompt = self.tokens[handle]
        ids = tuple(sorted(set(prompt))) if self._sampling.has_penalties else ()
        sampling = replace(self._sampling, prompt_ids=ids)
        return Join(handle, RequestRef(str(handle), 1), sampling, prompt_tokens=len(prompt))

    def continue_with(self, tokens: dict[int, list[int]], prompts: dict[int, tuple[int, ...]]) -> None:
        """Sequences that join with `tokens`, of which all but `prompts` were made elsewhere."""
        self.tokens = {handle: list(known) for handle, known in tokens.items()}
        joins = []
        for handle, known in tokens.items():
            join, prompt = self._join(handle), prompts[handle]
            ids = tuple(sorted(set(prompt))) if self._sampling.has_penalties else ()
            sampling = replace(join.sampling, prompt_ids=ids, generated=tuple(known[len(prompt) :]))
            joins.append(replace(join, sampling=sampling))
        self._number += 1
        deltas = pack_deltas({handle: [self._free.pop() for _ in range(9)] for handle in tokens})
        self._runner.apply(Command(self._number, joins=tuple(joins), page_deltas=deltas))
        self.step(list(tokens), whole=True)

    def close(self) -> None:
        self.copies.close()
        if self._runner.grammars is not None:
            self._runner.grammars.close()

    def step(self, handles: Sequence[int], *, whole: bool = False) -> None:
        """The next token of each; `whole`: with all that they have before."""
        starts = [0 if whole else len(self.tokens[handle]) - 1 for handle in handles]
        inputs = [self.tokens[handle][start:] for handle, start in zip(handles, starts, strict=True)]
        rows = [(h, start, len(ids), 0, 0, SAMPLE) for h, start, ids in zip(handles, starts, inputs, strict=True)]
        self._number += 1
        step = Step(self._number, 0, np.array(rows, dtype=np.int64), np.concatenate([EMPTY, *map(np.array, inputs)]))
        output = self._runner.run(step, hidden=None, sampled={})
        for handle, token_id in zip(handles, output.tensor.tolist(), strict=True):
            self.tokens[handle].append(token_id)

    def retract(self, handle: int) -> None:
        pages = self._runner.pages_of(handle)
        self.apply(retracts=(handle,))
        assert self.done.get(timeout=LIMIT_S).handle == handle
        self._free = [*pages, *self._free]


def decode(
    path: Path, disturbed: random.Random | None, sampling: SamplingParams = PLAIN, lost: float = 0.0
) -> dict[int, list[int]]:
    """Four sequences of different lengths for 24 steps; `disturbed`: any of them is away now and then, and a share of
    what is drawn is `lost` and drawn again."""
    decoder, away = Decoder(path, sampling), set[int]()
    handles = range(1, 5)
    decoder.tokens = {handle: [4 + 7 * handle + at for at in range(3 * handle)] for handle in handles}
    decoder.apply(joins=handles, pages=dict.fromkeys(handles, 9))
    decoder.step(handles, whole=True)
    wanted = {handle: len(tokens) + 24 for handle, tokens in decoder.tokens.items()}
    while running := [h for h in handles if len(decoder.tokens[h]) < wanted[h]]:
        if disturbed is not None:
            for handle in [h for h in running if disturbed.random() < 0.3]:
                if handle in away:
                    decoder.apply(pages={handle: 9}, resumes=(handle,))
                    assert decoder.done.get(timeout=LIMIT_S).direction is Direction.TO_POOL
                else:
                    decoder.retract(handle)
                away ^= {handle}
        if here := [handle for handle in running if handle not in away]:
            decoder.step(here)
            for handle in here:
                if disturbed is not None and disturbed.random() < lost:
                    decoder.tokens[handle].pop()
    decoder.apply(drops=tuple(handles))
    assert decoder.copies.num_bytes == 0
    decoder.close()
    return decoder.tokens


def test_a_sequence_that_comes_back_goes_on_as_if_it_had_never_been_away(model: Path) -> None:
    undisturbed = decode(model, None)
    for seed in range(3):
        assert decode(model, random.Random(seed)) == undisturbed


@pytest.mark.parametrize("sampling", [PENALISED, STRUCTURED], ids=["penalties", "structure"])
def test_so_does_one_whose_draws_depend_on_its_output(model: Path, sampling: SamplingParams) -> None:
    undisturbed = decode(model, None, sampling)
    assert undisturbed != decode(model, None, replace(PLAIN, temperature=sampling.temperature, seed=5))
    for seed in range(3):
        assert decode(model, random.Random(seed), sampling, lost=0.2) == undisturbed


@pytest.mark.parametrize("sampling", [PENALISED, STRUCTURED], ids=["penalties", "structure"])
@pytest.mark.parametrize("made", [1, 9, 23])
def test_a_later_attempt_counts_what_earlier_ones_made_as_output(
    model: Path, sampling: SamplingParams, made: int
) -> None:
    whole = decode(model, None, sampling)
    again = Decoder(model, sampling)
    for handle in range(1, 5):
        again.tokens[handle] = whole[handle][: 3 * handle]
    prompts = {handle: tuple(tokens) for handle, tokens in again.tokens.items()}
    again.continue_with({handle: tokens[: 3 * handle + made] for handle, tokens in whole.items()}, prompts)
    while len(again.tokens[1]) < len(whole[1]):
        again.step(range(1, 5))
    assert again.tokens == whole
    again.close()
