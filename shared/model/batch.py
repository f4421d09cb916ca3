"""What one forward pass of one stage works on: tokens of several rows, flat, and where their KV lives.

A row is one sequence's share of a step. Tokens of row 0 come first, then those of row 1, and so on:

    query_lens   (3, 1)           row 0 prefills three tokens, row 1 decodes one
    positions    [4, 5, 6,  9]
    context_lens (7, 10)          this step's tokens included
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens in B rows.

    positions: int64 [T], place of each token in its sequence.
    slots: int64 [T], page * page_size + offset: where each token's K and V go. No two are equal.
    query_lens: B counts of tokens in this step, at least 1 each; they add up to T.
    context_lens: B lengths of the sequences, this step's tokens included. The last `query_len` places are this step's.
    page_table: int64 [B, max_pages], the pages of each row in order; entries past the context are 0.
    logit_rows: int64 [R], indices into T of the tokens whose logits the last stage returns. May be empty.
    """

    positions: Tensor
    slots: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    page_table: Tensor
    logit_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)
