"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

MAX_TOKENS: Final = 1 << 31
MAX_LOGPROBS: Final = 1024
StructureKind = Literal["json_schema", "regex", "ebnf"]
STRUCTURE_KINDS: tuple[StructureKind, ...] = get_args(StructureKind)


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text of an answer must match: a JSON schema, a regular expression, or a grammar in EBNF."""

    kind: StructureKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch the filter off. `seed` is never absent
    here: the router draws one where the client gave none. `eos_token_ids` and `stop_token_ids` end the sequence and are
    emitted; `ignore_eos` switches off only the former. Neither is drawn among the first `min_tokens` tokens. `logprobs`
    is how many of the likeliest tokens to tell beside the drawn one; None tells nothing. `prompt_logprobs` is the same
    for the tokens of the prompt.

    The presence and frequency penalties are about the output, the repetition penalty is about `prompt_ids` too, which
    are the prompt's, each once, and empty without that penalty. `generated` is the part of the prompt, at its end, that
    earlier attempts made: to penalties and `structure` it is output."""

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
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    structure: Structure | None = None
    prompt_ids: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def needs_output(self) -> bool:
        """True if a draw depends on the tokens drawn before."""
        return self.has_penalties or self.structure is not None

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """The tokens that end the sequence."""
        return self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *self.eos_token_ids)

    def flaw(self, vocab_size: int) -> str | None:
        """The first field that would break a stage or its scheduler, and its limit; None if there is none. Routers
        check what clients send, and say more; this is for what comes from a router."""
        ids = (*self.eos_token_ids, *self.stop_token_ids)
        known = (*self.prompt_ids, *self.generated, *(token_id for token_id, _ in self.logit_bias))
        penalties = (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        told = self.prompt_logprobs
        for field, right, limit in (
            ("max_tokens", 1 <= self.max_tokens <= MAX_TOKENS, f"1..{MAX_TOKENS}"),
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in 0..1"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0..{MAX_LOGPROBS}"),
            ("prompt_logprobs", told is None or 0 <= told <= MAX_LOGPROBS, f"0..{MAX_LOGPROBS}"),
            ("logit_bias", all(0 <= token_id < vocab_size for token_id in known), f"of tokens in 0..{vocab_size - 1}"),
            ("presence_penalty", all(map(math.isfinite, penalties)), "finite, as biases are"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("stop_token_ids", all(0 <= token_id < vocab_size for token_id in ids), f"in 0..{vocab_size - 1}"),
        ):
            if not right:
                return f"{field}: must be {limit}"
        return None

    def ends(self, token_id: int, count: int) -> bool:
        """True if `token_id`, the `count`th new token, ends the sequence by a stop rule (not by its length)."""
        return count > self.min_tokens and token_id in self.ending_ids
