"""The reference: `transformers` on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NEAR_TIE = 1e-4


def check_greedy(model: Any, prompt: Sequence[int], made: Sequence[int]) -> int:
    """Fails unless `made` is the reference's greedy continuation of `prompt`. Returns how many tokens were compared:
    the comparison stops where the reference's two best logits are within NEAR_TIE.

    One forward over prompt and continuation says what greedy decoding would choose at each place, given that all
    places before agree.
    """
    ids = torch.tensor([[*prompt, *made]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    for at, token_id in enumerate(made):
        if float(best.values[at, 0] - best.values[at, 1]) <= NEAR_TIE:
            return at
        wanted = int(best.indices[at, 0])
        assert token_id == wanted, f"token {at} after {len(prompt)} of the prompt is {token_id}, not {wanted}"
    return len(made)
