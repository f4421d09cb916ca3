"""Log probabilities of a prompt, whatever chunks it is computed in, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import FLAGS, SAMPLE, TELL, Command, Join, Step, TokenLogprobs, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.device_rows import chunk_rows
from stagemesh.shared.engine.logit_rows import logit_rows
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.schedule.prefill_state import MAX_TOLD
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import open_model
from tests.support.prefill_sim import PrefillSim
from tests.support.reference import load_reference
from tests.support.tiny_models import make_tiny

PROMPTS = {1: [5, 9, 200, 31, 77, 8, 45, 11, 301, 19, 4, 250], 2: [7, 7, 8]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=2)


def told_in_chunks(path: Path, chunk: int) -> dict[int, list[TokenLogprobs]]:
    """Of prompt 1, in chunks; prompt 2 does not ask. Each step also draws for both that are complete."""
    source = open_model(str(path))
    layers = LayerRange(0, 2)
    weights = source.load(layers, torch.float64, first=True, last=True)
    stage = StageModel(source.config, layers, weights, torch.float64, first=True, last=True)
    runner = StageRunner(stage, allocate_pool(source.config, 2, 16, 4, torch.float64), first=True, last=True)
    asks = {1: SamplingParams(max_tokens=1, prompt_logprobs=2, logprobs=1), 2: SamplingParams(max_tokens=1)}
    joins = tuple(Join(h, RequestRef(str(h), 1), asks[h], prompt_tokens=len(PROMPTS[h])) for h in PROMPTS)
    runner.apply(Command(1, joins=joins, page_deltas=pack_deltas({1: [0, 1, 2, 3], 2: [4, 5]})))
    told: dict[int, list[TokenLogprobs]] = {1: [], 2: []}
    at = 0
    while at < len(PROMPTS[1]):
        count = min(chunk, len(PROMPTS[1]) - at)
        last = at + count == len(PROMPTS[1])
        rows, tokens = [(1, at, count, 0, 0, TELL | (SAMPLE if last else 0))], PROMPTS[1][at : at + count]
        if last:
            rows.insert(0, (2, 0, 3, 0, 0, SAMPLE))
            tokens = PROMPTS[2] + tokens
        at += count
        output = runner.run(Step(at, 0, np.array(rows), np.array(tokens)), hidden=None, sampled={})
        ids = output.tensor.tolist()
        assert [token_id >= 0 for token_id in ids] == [bool(row[5] & SAMPLE) for row in rows]
        assert set(output.logprobs) == {len(rows) - 1}
        told[1] += output.logprobs[len(rows) - 1].prompt
    told[2].append(output.logprobs[1])
    return told


@pytest.mark.parametrize("chunk", [1, 5, 6, 12])
def test_they_are_those_of_the_whole_prompt(model: Path, chunk: int) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        expected = load_reference(model)(torch.tensor([PROMPTS[1]])).logits[0].double().log_softmax(-1)
    told = told_in_chunks(model, chunk)
    assert len(told[1]) == len(PROMPTS[1]) - 1
    for place, (said, token_id) in enumerate(zip(told[1], PROMPTS[1][1:], strict=True)):
        assert said.logprob == pytest.approx(float(expected[place, token_id]), abs=1e-5)
        best = expected[place].topk(2)
        assert list(said.top_ids) == best.indices.tolist()
        assert list(said.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert told[2][0].logprob == pytest.approx(float(expected[-1].max()), abs=1e-5)


def test_a_chunk_has_logits_of_what_tells_and_what_draws() -> None:
    rows = np.array(
        [(1, 0, 3, 0, 0, 0), (2, 4, 2, 0, 0, TELL), (3, 0, 2, 0, 0, SAMPLE), (4, 8, 2, 0, 0, TELL | SAMPLE)]
    )
    wanted = logit_rows(rows)
    assert wanted.tokens.tolist() == [3, 4, 6, 7, 8]
    assert (wanted.sampled.tolist(), wanted.drawn_at.tolist(), wanted.told.tolist()) == ([2, 3], [2, 4], [1, 3])
    plain = logit_rows(np.array([(1, 0, 3, 0, 0, SAMPLE), (2, 4, 2, 0, 0, 0), (3, 0, 1, 0, 0, SAMPLE)]))
    assert (plain.tokens.tolist(), plain.sampled.tolist(), plain.drawn_at.tolist()) == ([2, 5], [0, 2], [0, 1])
    step = Step(1, 0, rows, np.arange(9))
    on_device = chunk_rows(step, lambda handle, end: list(range(4)), 4)
    assert on_device.wanted.tolist() == wanted.tokens.tolist(), "a GPU computes the same"


def test_such_a_prompt_is_computed_whole_in_smaller_chunks_and_told_at_its_end() -> None:
    sim = PrefillSim(num_stages=1, num_pages=400, chunk_size=2 * MAX_TOLD, page_size=4)
    asks = SamplingParams(max_tokens=1, prompt_logprobs=0)
    request = sim.submit(MAX_TOLD + 10, ticket=False, sampling=asks)
    told = [TokenLogprobs(-float(place)) for place in range(3)]
    steps = [command.step for command in sim.scheduler.poll().commands if command.step is not None]
    assert [step.num_tokens for step in steps] == [MAX_TOLD, 10]
    for step, row in zip(steps, (told[:2], told[2:]), strict=True):
        assert step.rows[0, FLAGS] & TELL
        drawn = np.array([9 if step.rows[0, FLAGS] & SAMPLE else -1])
        sim.scheduler.result(step.number, drawn, {0: TokenLogprobs(0.0, prompt=tuple(row))})
    (output,) = sim.scheduler.poll().outputs
    assert (output.request, output.token_ids, output.logprobs) == (request.ref, (9,), ())
    assert output.prompt_logprobs == tuple(told)
    assert sim.scheduler.pages.num_cached == 0
