"""Penalties and biases against plain arithmetic, and what a sequence remembers of its output."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.output_state import OutputState, shape_logits
from stagemesh.shared.engine.sampler import RowSampling, sample
from stagemesh.shared.errors import ProtocolViolation

VOCAB = 12
PENALTIES = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 4.0),), ((0, -100.0), (11, 2.0))]),
    prompt_ids=st.sampled_from([(), (2, 3), (0, 5, 11)]),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def by_hand(logits: list[float], params: SamplingParams, output: list[int]) -> list[float]:
    counts, shaped = Counter(output), []
    for token_id, logit in enumerate(logits):
        value = logit + dict(params.logit_bias).get(token_id, 0.0)
        if token_id in counts or token_id in params.prompt_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token_id]
        shaped.append(value - params.presence_penalty * (token_id in counts))
    return shaped


@given(st.lists(st.tuples(PENALTIES, TOKENS), min_size=1, max_size=4), st.integers(0, 99))
@settings(deadline=None)
def test_every_row_is_shaped_by_its_own_parameters(rows: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    logits = torch.randn(len(rows) + 1, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before, states = logits.clone(), []
    for params, output in rows:
        states.append(OutputState(params, 10))
        states[-1].feed(10, output)
    positions = [10 + len(output) for _, output in rows]
    shaped = shape_logits(logits, [*states, None], [*positions, 0], [()] * len(positions) + [()])
    assert torch.equal(logits, before), "the caller's logits are not changed"
    assert torch.equal(shaped[-1], logits[-1])
    for row, (params, output) in enumerate(rows):
        expected = torch.tensor(by_hand(logits[row].tolist(), params, output), dtype=torch.float64)
        torch.testing.assert_close(shaped[row], expected)


@given(PENALTIES, TOKENS, st.data())
@settings(deadline=None)
def test_the_state_follows_from_the_tokens_alone(
    params: SamplingParams, output: list[int], data: st.DataObject
) -> None:
    """However they came: drawn here, sent as literals, drawn in vain and drawn again, or by an earlier attempt."""
    like = torch.zeros(VOCAB)
    earlier = data.draw(st.integers(0, len(output)))
    state = OutputState(replace(params, generated=tuple(output[:earlier])), 10 + earlier)
    state.counts(like)
    for position, token_id in enumerate(output[earlier:], 10 + earlier):
        if data.draw(st.booleans()):
            state.drawn((token_id + 1) % VOCAB)
        if data.draw(st.booleans()):
            state.feed(position, [token_id])
        else:
            state.go_to(position)
            state.drawn(token_id)
    assert list(state.tokens) == output
    counts = Counter(output)
    assert state.counts(like).tolist() == [counts[token_id] for token_id in range(VOCAB)]


def test_a_prompt_is_no_output_and_a_gap_is_a_violation() -> None:
    state = OutputState(SamplingParams(max_tokens=9, presence_penalty=1.0), 4)
    state.feed(0, [7, 8, 9, 7])
    assert list(state.tokens) == []
    state.feed(2, [9, 7, 5])
    assert list(state.tokens) == [5]
    with pytest.raises(ProtocolViolation, match="position 6 comes after 1 tokens from 4 on"):
        state.go_to(6)


def test_a_strong_bias_decides_the_draw_and_a_ban_outweighs_it() -> None:
    state = OutputState(SamplingParams(max_tokens=9, logit_bias=((5, 100.0),)), 4)
    shaped = shape_logits(torch.zeros(1, VOCAB), [state], [4], [()])
    for temperature in (0.0, 1.0):
        row = RowSampling(temperature, banned=(5,), banned_before=5)
        assert int(sample(shaped, [row], [4])) != 5
        assert int(sample(shaped, [row], [5])) == 5
