"""The draw: right frequencies, filters as specified, and never a dependence on the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.engine.sampler import NOISE_SPAN, RowSampling, floors, gumbel_noise, noise_key, sample, scale

DRAWS = 20_000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def draw_many(logits: torch.Tensor, row: RowSampling, draws: int = DRAWS) -> torch.Tensor:
    """How often each token is drawn at the positions 0 .. draws - 1."""
    ids = sample(logits.expand(draws, -1), [row] * draws, range(draws))
    return torch.bincount(ids, minlength=logits.shape[-1])


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    total = counts.sum() * expected
    return float(((counts - total) ** 2 / total).sum())


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    ids = sample(logits, [RowSampling(), RowSampling()], [0, 0])
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 12345, 2**63 + 11])
def test_frequencies_are_those_of_the_softmax(temperature: float, seed: int) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.25])
    counts = draw_many(logits, RowSampling(temperature, seed=seed))
    # 7 degrees of freedom: above 29.9 with probability 1e-4; the draws are fixed, so this never flickers.
    assert chi_square(counts, (logits / temperature).softmax(-1)) < 29.9


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    size = 100
    for keys in (
        [noise_key(7, position) for position in range(size)],
        [noise_key(seed, 7) for seed in range(size)],
    ):
        pairs = torch.tensor([(key & 0xFFFFFFFF, key >> 32) for key in keys])
        noise = torch.stack([gumbel_noise(pair.expand(1000, 2), torch.arange(1000)) for pair in pairs])
        correlation = torch.corrcoef(noise).fill_diagonal_(0)
        assert float(correlation.abs().max()) < 0.16  # 5 sigma of 1000 samples
        assert abs(float(noise.mean()) - 0.5772) < 0.02  # a standard Gumbel's mean and deviation
        assert abs(float(noise.std()) - math.pi / math.sqrt(6)) < 0.02


def test_noise_is_the_same_on_every_machine() -> None:
    assert noise_key(0, 0) == 0xA706DD2F4D197E6F
    assert noise_key(2**64 - 1, 31) == noise_key(-1, 31)
    low, high, ids = 0x4D197E6F, 0xA706DD2F, [0, 1, 2, 49151, 2**31 - 1]
    hashed = [murmur(murmur((token_id + low) % 2**32) ^ high) for token_id in ids]
    expected = torch.tensor([-math.log(-math.log1p(-(value + 0.5) / 2**32)) for value in hashed])
    noise = gumbel_noise(torch.tensor([[low, high]]).expand(len(ids), 2), torch.tensor(ids))
    torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-5)


def murmur(value: int) -> int:
    """The 32-bit finalizer in plain integers."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B % 2**32
    value = (value ^ (value >> 13)) * 0xC2B2AE35 % 2**32
    return value ^ (value >> 16)


def test_noise_stays_within_its_span() -> None:
    lowest, highest = -math.log(-math.log(2**-24)), -math.log(-math.log1p(-0.5 / 2**32))
    assert highest - lowest < NOISE_SPAN


def test_top_k_keeps_k_and_what_equals_the_kth() -> None:
    logits = torch.tensor([0.0, 4.0, 2.0, 3.0, 2.0, 1.0])
    assert set(draw_many(logits, RowSampling(3.0, top_k=2), 2000).nonzero()[:, 0].tolist()) == {1, 3}
    assert set(draw_many(logits, RowSampling(3.0, top_k=3), 2000).nonzero()[:, 0].tolist()) == {1, 2, 3, 4}


def test_top_p_is_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    rows = [
        RowSampling(1.0, top_p=0.7),  # 0.4 + 0.3 is enough only without rounding: see the next
        RowSampling(1.0, top_p=0.69),
        RowSampling(1.0, top_p=0.39),
        RowSampling(1.0, top_k=2, top_p=0.5),  # 0.4 / 0.7 is more than half
        RowSampling(1.0, top_k=2, top_p=0.6),
    ]
    scaled = scale(logits.expand(len(rows), -1), rows)
    kept = (scaled >= floors(scaled, rows)[:, None]).sum(-1).tolist()
    assert kept[1:] == [2, 1, 1, 2]
    assert kept[0] in (2, 3)


def test_a_nucleus_larger_than_the_first_guess_is_exact() -> None:
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.01], [0.1], [4.0]])
    rows = [RowSampling(1.0, top_p=0.9)] * 3
    scaled = scale(logits, rows)
    kept = scaled >= floors(scaled, rows)[:, None]
    weights = scaled.double().softmax(-1)
    for row in range(3):
        share = float(weights[row][kept[row]].sum())
        least = float(weights[row][kept[row]].min())
        assert share >= 0.9 - 1e-6 > share - least - 2e-6  # enough, and without the last one not enough


def test_filtered_frequencies_are_renormalised() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    counts = draw_many(logits, RowSampling(1.5, top_k=4, top_p=0.8, seed=3))
    kept = logits[:3] / 1.5  # of the top 4's weight the first three hold 0.85, the first two 0.68
    assert counts[3:].sum() == 0
    assert chi_square(counts[:3], kept.softmax(-1)) < 18.5  # 2 degrees of freedom, 1e-4


ROWS = st.lists(
    st.builds(
        RowSampling,
        temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
        top_k=st.sampled_from([0, 1, 5, 50, 10_000]),
        top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
        seed=st.integers(0, 2**64 - 1),
    ),
    min_size=1,
    max_size=9,
)


@given(rows=ROWS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_token_depends_on_its_own_row_alone(rows: list[RowSampling], data: st.DataObject) -> None:
    torch.set_num_threads(1)
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(len(rows))) * 3
    positions = [data.draw(st.integers(0, 10_000)) for _ in rows]
    together = sample(logits, rows, positions).tolist()
    assert together == sample(logits, rows, positions).tolist()
    alone = [int(sample(logits[row : row + 1], [rows[row]], [positions[row]])) for row in range(len(rows))]
    assert together == alone
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[order], [rows[row] for row in order], [positions[row] for row in order])
    assert shuffled.tolist() == [together[row] for row in order]


def test_cold_rows_are_greedy_and_seeds_and_positions_matter() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(5))
    assert int(sample(logits, [RowSampling(1e-6)], [3])) == int(logits.argmax())
    ids = {int(sample(logits, [RowSampling(1.0, seed=seed)], [position])) for seed in range(8) for position in range(8)}
    assert len(ids) > 30


def test_float64_logits_work() -> None:
    logits = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = [RowSampling(0.7, 10, 0.9, 1), RowSampling()]
    assert sample(logits, rows, [0, 0]).tolist() == sample(logits.float(), rows, [0, 0]).tolist()
