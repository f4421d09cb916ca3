"""The reference: `transformers` on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-4


def load_reference(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The model in a Hugging Face directory. Experts run one by one: the grouped product knows no float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")


def check_greedy(model: Any, prompt: Sequence[int], made: Sequence[int]) -> int:
    """Fails unless `made` is the reference's greedy continuation of `prompt`. Returns how many tokens were compared:
    the comparison stops where the reference's two best logits are within NEAR_TIE.

    One forward over prompt and continuation says what greedy decoding would choose at each place, given that all
    places before agree.
    """
    ids = torch.tensor([[*prompt, *made]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return _check(logits, made, len(prompt))


@lru_cache(maxsize=4096)
def check_greedy_once(model: Any, prompt: tuple[int, ...], made: tuple[int, ...]) -> int:
    """The same, for answers that come again and again: what was found right is not computed anew."""
    return check_greedy(model, prompt, made)


def check_greedy_family(
    model: Any, common: Sequence[int], prompts: Sequence[Sequence[int]], made: Sequence[Sequence[int]]
) -> int:
    """The same for prompts that begin with `common`, which is computed once."""
    from transformers import DynamicCache

    compared, known = 0, DynamicCache(config=model.config)
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # of older versions
    with torch.inference_mode():
        model(torch.tensor([common]), use_cache=True, logits_to_keep=1, **{name: known})
        for prompt, tokens in zip(prompts, made, strict=True):
            ids = torch.tensor([[*prompt[len(common) :], *tokens]])
            logits = model(ids, use_cache=True, **{name: deepcopy(known)}).logits[0, -len(tokens) - 1 : -1]
            compared += _check(logits, tokens, len(prompt))
    return compared


def _check(logits: torch.Tensor, made: Sequence[int], prompt_tokens: int) -> int:
    best = logits.topk(2, dim=-1)
    for at, token_id in enumerate(made):
        if float(best.values[at, 0] - best.values[at, 1]) <= NEAR_TIE:
            return at
        wanted = int(best.indices[at, 0])
        assert token_id == wanted, f"token {at} after {prompt_tokens} of the prompt is {token_id}, not {wanted}"
    return len(made)
