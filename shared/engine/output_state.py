"""What the draws of one sequence depend on beside its logits: the tokens of its output, counted, and the state of its
grammar. It lives on the last stage and follows from the tokens alone:

join: the output of earlier attempts --literal ids in steps, draws--> a token a step --an earlier position again--> back

So nothing is handed over when a sequence is retracted, resumed, or run on elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.grammar import Matcher
from stagemesh.shared.engine.penalties import add_bias, allow, penalise
from stagemesh.shared.errors import ProtocolViolation


class OutputState:
    """`prompt_tokens` is what the sequence joined with, the output of earlier attempts included."""

    def __init__(self, params: SamplingParams, prompt_tokens: int, matcher: Matcher | None = None) -> None:
        self.params, self.matcher = params, matcher
        self._first = prompt_tokens - len(params.generated)  # the position of the first token of the output
        self._tokens: list[int] = []
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None
        for token_id in params.generated:
            self._push(token_id)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def failure(self) -> str:
        """Why the sequence cannot go on, field first."""
        if self.params.structure is None:
            return ""
        why = "has not been prepared here" if self.matcher is None else self.matcher.failure
        return f"{self.params.structure.kind}: {why}" if why else ""

    def feed(self, start: int, token_ids: Sequence[int]) -> None:
        """A step runs these tokens, from position `start` on. Those of the output may be news: the first comes from a
        prefill instance, and a sequence that has been away comes back with its last. Raises ProtocolViolation if tokens
        before them are missing."""
        skipped = max(0, self._first - start)
        for position, token_id in enumerate(token_ids[skipped:], start + skipped):
            index = position - self._first
            if index < len(self._tokens) and self._tokens[index] == token_id:
                continue
            self.go_to(position)
            self._push(token_id)

    def go_to(self, position: int) -> None:
        """The next token to come is that of `position`. Forgets what was drawn there and has been discarded."""
        keep = position - self._first
        if keep > len(self._tokens):
            raise ProtocolViolation(f"position {position} comes after {len(self._tokens)} tokens from {self._first} on")
        if keep == len(self._tokens):
            return
        if self._counts is not None:
            gone = torch.tensor(self._tokens[keep:], device=self._counts.device)
            self._counts.index_add_(0, gone, torch.full_like(gone, -1, dtype=self._counts.dtype))
        del self._tokens[keep:]
        if self.matcher is not None:
            self.matcher.go_back(keep)

    def drawn(self, token_id: int) -> None:
        self._push(token_id)

    def _push(self, token_id: int) -> None:
        self._tokens.append(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def counts(self, like: Tensor) -> Tensor:
        """How often the output has each token: [vocab], for `like` [..., vocab]."""
        if self._counts is None:
            self._counts = torch.zeros_like(like)
            said = torch.tensor(self._tokens, dtype=torch.int64, device=like.device)
            self._counts.index_add_(0, said, torch.ones_like(said, dtype=like.dtype))
        return self._counts

    def in_prompt(self, like: Tensor) -> Tensor:
        """Bool [vocab]."""
        if self._in_prompt is None:
            said = torch.tensor(self.params.prompt_ids, dtype=torch.int64, device=like.device)
            self._in_prompt = torch.zeros_like(like, dtype=torch.bool).index_fill_(0, said, True)
        return self._in_prompt


def shape_logits(
    logits: Tensor, rows: Sequence[OutputState | None], positions: Sequence[int], banned: Sequence[Sequence[int]]
) -> Tensor:
    """What each row draws from, [R, vocab]: its logits with bias, penalties and grammar. `positions` are those of the
    tokens to be drawn; `banned` must not be drawn, unless the grammar allows nothing else. The same tensor if no row
    asks for anything."""
    states = [(place, state) for place, state in enumerate(rows) if state is not None]
    if not states:
        return logits
    for place, state in states:
        state.go_to(positions[place])
    shaped = logits
    if biased := [(place, state) for place, state in states if state.params.logit_bias]:
        shaped = _replace(shaped, biased, lambda chosen: add_bias(chosen, [state.params for _, state in biased]))
    if penalised := [(place, state) for place, state in states if state.params.has_penalties]:
        params = [state.params for _, state in penalised]
        counts = torch.stack([state.counts(logits[place]) for place, state in penalised])
        in_prompt = torch.stack([state.in_prompt(logits[place]) for place, state in penalised])
        shaped = _replace(shaped, penalised, lambda chosen: penalise(chosen, counts, in_prompt, params))
    if ruled := [(place, state) for place, state in states if state.matcher is not None]:
        masks = torch.stack([state.matcher.mask(banned[place]) for place, state in ruled if state.matcher is not None])
        shaped = _replace(shaped, ruled, lambda chosen: allow(chosen, masks.to(logits.device)))
    return shaped


def _replace(logits: Tensor, rows: Sequence[tuple[int, OutputState]], change: Callable[[Tensor], Tensor]) -> Tensor:
    """`logits` with those of `rows` changed; never in place."""
    index = torch.tensor([place for place, _ in rows], device=logits.device)
    return logits.index_copy(0, index, change(logits.index_select(0, index)))
