"""Logits with penalties for what prompt and output have already, and with the biases that a request asks for.

logits + bias -> repetition (a factor, for tokens of prompt or output) -> frequency, presence (a difference, for tokens
of the output). In the order, and with the meaning, that the field's servers have given to these parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stagemesh.shared.core.sampling import SamplingParams


def add_bias(logits: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """`logits` [R, vocab] with each row's biases; the same tensor if there are none."""
    places = [(place, token_id) for place, row in enumerate(rows) for token_id, _ in row.logit_bias]
    if not places:
        return logits
    index = torch.tensor(places, device=logits.device)
    values = [value for row in rows for _, value in row.logit_bias]
    bias = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits.index_put((index[:, 0], index[:, 1]), bias, accumulate=True)


def penalise(logits: Tensor, counts: Tensor, in_prompt: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """`logits` [R, vocab] of rows whose output has each token `counts` [R, vocab] times, and whose prompt has those
    that are true in `in_prompt` [R, vocab]."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    repetition = column([row.repetition_penalty for row in rows])
    factor = torch.where(logits > 0, 1 / repetition, repetition)
    penalised = torch.where(in_prompt | (counts > 0), logits * factor, logits)
    penalised -= column([row.frequency_penalty for row in rows]) * counts
    return penalised.sub_(column([row.presence_penalty for row in rows]) * (counts > 0))


def allow(logits: Tensor, masks: Tensor) -> Tensor:
    """`logits` [R, vocab] with all tokens at -inf whose bit is not set in `masks`, int32 [R, ceil(vocab / 32)]."""
    bits = (masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
    allowed = bits.view(len(masks), -1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, float("-inf"))
