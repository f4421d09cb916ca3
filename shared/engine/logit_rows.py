"""Which tokens of a step the last stage needs the logits of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagemesh.shared.core.commands import COUNT, FLAGS, SAMPLE, TELL, Ints


@dataclass(frozen=True, slots=True)
class LogitRows:
    """`tokens`: int64 [R], in ascending order, the step's tokens whose logits are computed. `sampled`: the step's rows
    that draw, and `drawn_at`: which of the R each of them draws from. `told`: the rows that tell of the prompt."""

    tokens: Ints
    sampled: Ints
    drawn_at: Ints
    told: Ints


def logit_rows(rows: Ints) -> LogitRows:
    """Of a step's `rows`. Most steps tell nothing of prompts: then it is the last token of each row that draws."""
    flags, ends = rows[:, FLAGS], np.cumsum(rows[:, COUNT])
    sampled, told = np.flatnonzero(flags & SAMPLE), np.flatnonzero(flags & TELL)
    last = ends[sampled] - 1
    if not len(told):
        return LogitRows(last, sampled, np.arange(len(sampled)), told)
    whole = [np.arange(ends[row] - rows[row, COUNT], ends[row]) for row in told]
    tokens = np.unique(np.concatenate([last, *whole]))
    return LogitRows(tokens, sampled, np.searchsorted(tokens, last), told)
