"""From logits to token ids.

logits -> banned tokens out -> / temperature -> floors (top-k, top-p of what is left, min-p) -> Gumbel-max of the rest

Each filter is a floor: the lowest scaled logit that it lets through, so tokens of equal logit stay or go together and
the highest floor decides. The draw adds noise to each token that is left and takes the highest sum, which is a sample
of their softmax (the Gumbel-max trick). The noise is hashed from (seed, position, token id) in integers, so a token
never depends on its row in the batch, on the other rows, or on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MASK_32: Final = 0xFFFFFFFF
MASK_64: Final = 0xFFFFFFFFFFFFFFFF
COLDEST: Final = 1e-9  # a lower temperature draws the same tokens, until it is 0 as a float32
NUCLEUS_GUESS: Final = 512  # a top-p set is rarely larger; where it is, all logits of the row are sorted
TOLD_AT_ONCE: Final = 64  # rows
NOISE_SPAN: Final = 27.0  # more than the noise of two tokens can differ by: 32 bits give -3.2 .. 22.9


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row is sampled. `temperature` 0 is greedy; `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch the filter off.
    At positions below `banned_before` the tokens `banned` are never drawn; where the row `has_grammar`, that knows."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    banned: tuple[int, ...] = ()
    banned_before: int = 0
    has_grammar: bool = False


def sample(logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    """One token id a row, int64 [R]. `logits`: float [R, vocab]; `positions`: the place of the drawn token in its
    sequence. Of equal logits the lowest id is the greedy one."""
    logits = ban(logits, rows, positions)
    greedy = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(rows) if sampling.temperature > 0]
    if not drawn:
        return greedy
    chosen = [rows[row] for row in drawn]
    index = torch.tensor(drawn, device=logits.device)
    scaled = scale(logits.index_select(0, index), chosen)
    keys = [noise_key(row.seed, positions[place]) for place, row in zip(drawn, chosen, strict=True)]
    return greedy.index_copy_(0, index, draw(scaled, floors(scaled, chosen), keys))


def ban(logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    """The logits [R, vocab] with what a row must not draw yet at -inf; the same tensor if there is nothing."""
    places = [
        (place, token_id)
        for place, (row, position) in enumerate(zip(rows, positions, strict=True))
        if position < row.banned_before and not row.has_grammar
        for token_id in row.banned
    ]
    if not places:
        return logits
    index = torch.tensor(places, device=logits.device)
    return logits.clone().index_put_((index[:, 0], index[:, 1]), torch.tensor(float("-inf"), dtype=logits.dtype))


def scale(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Logits over temperature, each row's highest at 0: a temperature close to 0 overflows nothing that counts."""
    temperatures = torch.tensor([max(row.temperature, COLDEST) for row in rows], dtype=logits.dtype)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.to(logits.device)[:, None]


def floors(scaled: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """The lowest scaled logit [R] that each row may draw."""
    floor = torch.full_like(scaled[:, 0], float("-inf"))
    if limited := [place for place, row in enumerate(rows) if 0 < row.top_k < scaled.shape[1]]:
        index = torch.tensor(limited, device=scaled.device)
        top_k_floor = _top_k_floor(scaled.index_select(0, index), [rows[place].top_k for place in limited])
        floor.index_copy_(0, index, torch.maximum(floor.index_select(0, index), top_k_floor))
    if limited := [place for place, row in enumerate(rows) if row.top_p < 1]:
        index = torch.tensor(limited, device=scaled.device)
        so_far = floor.index_select(0, index)
        top_p_floor = _top_p_floor(scaled.index_select(0, index), so_far, [rows[place].top_p for place in limited])
        floor.index_copy_(0, index, torch.maximum(so_far, top_p_floor))
    if any(row.min_p > 0 for row in rows):
        ratios = torch.tensor([row.min_p for row in rows], dtype=scaled.dtype)
        floor = torch.maximum(floor, ratios.log().to(scaled.device))  # each row's highest is at 0
    return floor.clamp_(min=-NOISE_SPAN)  # lower tokens could never win the draw: no filter, only speed


def draw(scaled: Tensor, floor: Tensor, keys: Sequence[int]) -> Tensor:
    """A token id of each row, int64 [R], from the softmax of the tokens at or above the row's floor."""
    places, token_ids = (scaled >= floor[:, None]).nonzero(as_tuple=True)
    key_tensor = torch.tensor([(key & MASK_32, key >> 32) for key in keys], device=scaled.device)
    noisy = scaled[places, token_ids] + gumbel_noise(key_tensor.index_select(0, places), token_ids).to(scaled.dtype)
    return torch.full_like(scaled, float("-inf")).index_put_((places, token_ids), noisy).argmax(dim=-1)


def noise_key(seed: int, position: int) -> int:
    """64 bits that the noise of one draw is hashed from: two rounds of SplitMix64 (Steele, Lea, Flood 2014)."""
    return _split_mix((_split_mix(seed & MASK_64) + position) & MASK_64)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [n]. `keys`: int64 [n, 2], the low and the high half of each key."""
    hashed = _mix((token_ids + keys[:, 0]) & MASK_32)
    hashed = _mix(hashed ^ keys[:, 1])
    # Small values of a float32 are exact to 24 bits of their own, so the tail that decides a draw keeps all 32 bits.
    uniform = ((hashed.double() + 0.5) / (MASK_32 + 1)).float()
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1 - 2**-24)))


def _split_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _mix(value: Tensor) -> Tensor:
    """The 32-bit finalizer of MurmurHash3 on int64 tensors that hold 32 bits. The products wrap around at 64 bits
    alike on every device, and only their low 32 are kept."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & MASK_32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & MASK_32
    return value ^ (value >> 16)


def _top_k_floor(scaled: Tensor, limits: Sequence[int]) -> Tensor:
    best = scaled.topk(max(limits), dim=-1).values
    return best.gather(1, torch.tensor(limits, device=scaled.device)[:, None] - 1)[:, 0]


def _top_p_floor(scaled: Tensor, floor: Tensor, shares: Sequence[float]) -> Tensor:
    """The least of the highest tokens, at or above `floor`, that have the share of the weight between them. Sums are
    in float64: a row's floor must not depend on how a batch is cut for summing."""
    kept = scaled.masked_fill(scaled < floor[:, None], float("-inf"))
    wanted = kept.exp().sum(dim=-1, dtype=torch.float64) * torch.tensor(shares, dtype=torch.float64).to(scaled.device)
    guess = min(NUCLEUS_GUESS, kept.shape[1])
    best = kept.topk(guess, dim=-1).values
    sums = best.exp().cumsum(dim=-1, dtype=torch.float64)
    if guess < kept.shape[1] and bool((short := sums[:, -1] < wanted).any()):
        rows = short.nonzero()[:, 0]
        result = _floor_of_sorted(best, sums, wanted)
        ranked = kept.index_select(0, rows).sort(dim=-1, descending=True).values
        exact = _floor_of_sorted(ranked, ranked.exp().cumsum(dim=-1, dtype=torch.float64), wanted.index_select(0, rows))
        return result.index_copy_(0, rows, exact)
    return _floor_of_sorted(best, sums, wanted)


def _floor_of_sorted(ranked: Tensor, sums: Tensor, wanted: Tensor) -> Tensor:
    """The first of `ranked` [R, n] where the `sums` reach `wanted` [R]; the last where rounding keeps them below."""
    place = (sums < wanted[:, None]).sum(dim=-1).clamp_(max=ranked.shape[1] - 1)
    return ranked.gather(1, place[:, None])[:, 0]


def prompt_log_probabilities(
    logits: Tensor, token_ids: Sequence[int], count: int
) -> list[tuple[float, tuple[int, ...], tuple[float, ...]]]:
    """`log_probabilities` of many rows, a few at a time for the sake of memory."""
    told = []
    for at in range(0, len(logits), TOLD_AT_ONCE):
        chosen = token_ids[at : at + TOLD_AT_ONCE]
        told += log_probabilities(logits[at : at + TOLD_AT_ONCE], chosen, [count] * len(chosen))
    return told


def log_probabilities(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[tuple[float, tuple[int, ...], tuple[float, ...]]]:
    """For each row of `logits` [R, vocab]: the log probability of its token, and the ids and log probabilities of its
    `counts[row]` likeliest tokens. Of the model's own distribution: before temperature and filters."""
    exact = logits.double().log_softmax(dim=-1)
    own = exact.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    best = exact.topk(max(1, *counts), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [(own[row], tuple(ids[row][:count]), tuple(values[row][:count])) for row, count in enumerate(counts)]
