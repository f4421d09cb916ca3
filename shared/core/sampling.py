"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch the filter off. `seed` is never absent
    here: the router draws one where the client gave none. `eos_token_ids` and `stop_token_ids` end the sequence and are
    emitted; `ignore_eos` switches off only the former. Neither is drawn among the first `min_tokens` tokens. `logprobs`
    is how many of the likeliest tokens to tell beside the drawn one; None tells nothing."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    min_p: float = 0.0
    logprobs: int | None = None

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """The tokens that end the sequence."""
        return self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *self.eos_token_ids)

    def ends(self, token_id: int, count: int) -> bool:
        """True if `token_id`, the `count`th new token, ends the sequence by a stop rule (not by its length)."""
        return count > self.min_tokens and token_id in self.ending_ids
