"""min_p, banned tokens and log probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.sampler import RowSampling, log_probabilities, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -3.0]])


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.floats(0.01, 1.0))
def test_min_p_keeps_what_is_likely_enough_against_the_likeliest(seed: int, position: int, min_p: float) -> None:
    row = RowSampling(temperature=1.0, seed=seed, min_p=min_p)
    token_id = int(sample(LOGITS, [row], [position])[0])
    assert math.exp(float(LOGITS[0, token_id] - LOGITS[0, 0])) >= min_p * (1 - 1e-6)


def test_min_p_of_one_leaves_the_likeliest() -> None:
    rows = [RowSampling(temperature=5.0, seed=seed, min_p=1.0) for seed in range(50)]
    assert sample(LOGITS.repeat(50, 1), rows, list(range(50))).tolist() == [0] * 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_not_drawn_before_their_position(temperature: float) -> None:
    row = RowSampling(temperature=temperature, top_k=1, banned=(0, 1), banned_before=7)
    assert [int(sample(LOGITS, [row], [position])[0]) for position in (5, 6, 7, 8)] == [2, 2, 0, 0]
    assert LOGITS[0, 0] == 2.0, "the caller's logits are not changed"


def test_log_probabilities_are_those_of_the_whole_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    told = log_probabilities(logits, [4, 9, 0], [0, 2, 5])
    exact = logits.double().log_softmax(-1)
    for row, ((own, ids, values), token_id, count) in enumerate(zip(told, [4, 9, 0], [0, 2, 5], strict=True)):
        assert own == pytest.approx(float(exact[row, token_id]))
        assert list(ids) == exact[row].topk(max(1, count)).indices.tolist()[:count]
        assert list(values) == pytest.approx(exact[row].topk(max(1, count)).values.tolist()[:count])


def test_no_stop_rule_applies_to_the_first_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, eos_token_ids=(2,), stop_token_ids=(5,), min_tokens=3)
    assert [params.ends(2, count) for count in (1, 3, 4)] == [False, False, True]
    assert params.ends(5, 4)
    assert not params.ends(6, 4)
