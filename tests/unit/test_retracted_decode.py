"""Sequences that are retracted and resumed on a stage with layers make the tokens that they would have made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import EMPTY, SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.host_copies import CopyDone, CpuPageCopier, Direction, HostCopies
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import open_model
from tests.support.tiny_models import make_tiny

LIMIT_S = 30.0
PAGE, NUM_PAGES = 4, 64
SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=2)


class Decoder:
    """Decodes sequences one by one or together on a stage that is all there is, in float64."""

    def __init__(self, path: Path) -> None:
        source = open_model(str(path))
        layers = LayerRange(0, source.config.num_layers)
        weights = source.load(layers, torch.float64, first=True, last=True)
        model = StageModel(source.config, layers, weights, torch.float64, first=True, last=True)
        pool = allocate_pool(source.config, len(layers), NUM_PAGES, PAGE, torch.float64)
        self.copies = HostCopies(CpuPageCopier(pool), 1 << 30)
        self.done: SimpleQueue[CopyDone] = SimpleQueue()
        self.copies.listen(self.done.put)
        self._runner = StageRunner(model, pool, first=True, last=True, copies=self.copies)
        self._free = list(range(NUM_PAGES))
        self._number = 0
        self.tokens: dict[int, list[int]] = {}

    def apply(self, *, joins: Sequence[int] = (), pages: dict[int, int] | None = None, **lists: Any) -> None:
        """`pages` are counts of new ones by handle."""
        self._number += 1
        taken = {handle: [self._free.pop() for _ in range(count)] for handle, count in (pages or {}).items()}
        joining = tuple(Join(handle, RequestRef(str(handle), 1), SAMPLING) for handle in joins)
        self._runner.apply(Command(self._number, joins=joining, page_deltas=pack_deltas(taken), **lists))

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


def decode(path: Path, disturbed: random.Random | None) -> dict[int, list[int]]:
    """Four sequences of different lengths for 24 steps; `disturbed`: any of them is away now and then."""
    decoder, away = Decoder(path), set[int]()
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
    decoder.apply(drops=tuple(handles))
    assert decoder.copies.num_bytes == 0
    decoder.copies.close()
    return decoder.tokens


def test_a_sequence_that_comes_back_goes_on_as_if_it_had_never_been_away(model: Path) -> None:
    undisturbed = decode(model, None)
    for seed in range(3):
        assert decode(model, random.Random(seed)) == undisturbed
