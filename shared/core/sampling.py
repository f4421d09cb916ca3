"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 switch the filter off. `seed` is never absent here: the
    router draws one where the client gave none. `eos_token_ids` and `stop_token_ids` end the sequence and are
    emitted; `ignore_eos` switches off only the former."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def ends(self, token_id: int) -> bool:
        """True if `token_id` ends the sequence by a stop rule (its length is counted elsewhere)."""
        return token_id in self.stop_token_ids or (not self.ignore_eos and token_id in self.eos_token_ids)
