"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_TOKENS: Final = 1 << 31
MAX_LOGPROBS: Final = 1024


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

    def flaw(self, vocab_size: int) -> str | None:
        """The first field that would break a stage or its scheduler, and its limit; None if there is none. Routers
        check what clients send, and say more; this is for what comes from a router."""
        ids = (*self.eos_token_ids, *self.stop_token_ids)
        for field, right, limit in (
            ("max_tokens", 1 <= self.max_tokens <= MAX_TOKENS, f"1..{MAX_TOKENS}"),
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in 0..1"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0..{MAX_LOGPROBS}"),
            ("stop_token_ids", all(0 <= token_id < vocab_size for token_id in ids), f"in 0..{vocab_size - 1}"),
        ):
            if not right:
                return f"{field}: must be {limit}"
        return None

    def ends(self, token_id: int, count: int) -> bool:
        """True if `token_id`, the `count`th new token, ends the sequence by a stop rule (not by its length)."""
        return count > self.min_tokens and token_id in self.ending_ids
