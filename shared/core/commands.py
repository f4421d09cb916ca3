"""Step commands: the only thing that changes a stage's state. Numbered, immutable, applied in order, exactly once.

A row of a step is `[handle, start, count, source_step, source_row, flags]`: the sequence `handle` runs its tokens at
positions [start, start + count). The ids are either literal (taken in order from `tokens`), or, with
FROM_STEP, the single id that row `source_row` of step `source_step` sampled, which the head need not know yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from stagemesh.shared.core.directory import StageInfo
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams

Ints = npt.NDArray[np.int64]
EMPTY: Final[Ints] = np.zeros(0, dtype=np.int64)

HANDLE, START, COUNT, SOURCE_STEP, SOURCE_ROW, FLAGS = range(6)
ROW_WIDTH: Final = 6
FROM_STEP: Final = 1  # the input id is the one sampled by (source_step, source_row)
SAMPLE: Final = 2  # the last stage samples after this row's last token
TELL: Final = 4  # the last stage tells the log probabilities of this row's tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities: of the drawn token, and of the likeliest ones in order. `prompt`
    are those of the prompt's tokens that the same row has computed; where it drew none, they are all it tells.
    `failure`: why the sequence cannot go on, field first; then the row's token is none, and nothing else is told."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()
    failure: str = ""


RowLogprobs = Mapping[int, TokenLogprobs]
NO_LOGPROBS: Final[RowLogprobs] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Where the KV of a prompt goes: page i of the prompt to page `pages[i]` on the `targets` that own its layers."""

    ticket_id: str
    prompt_tokens: int
    pages: tuple[int, ...]
    targets: tuple[StageInfo, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence enters the stages under `handle`, which is free again once the command that drops it is applied."""

    handle: int
    request: RequestRef
    sampling: SamplingParams
    send: SendPlan | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward of one microbatch. `rows` int64 [n, 6]; `tokens` int64, the literal ids."""

    number: int
    microbatch: int
    rows: Ints
    tokens: Ints

    @property
    def num_tokens(self) -> int:
        return int(self.rows[:, COUNT].sum())

    @property
    def source_steps(self) -> frozenset[int]:
        """The steps whose sampled ids this one takes as its input."""
        taken = self.rows[(self.rows[:, FLAGS] & FROM_STEP) != 0, SOURCE_STEP]
        return frozenset(int(number) for number in taken)


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """Order within a command: drops, cancels, joins, retracts, page deltas, resumes, step. `page_deltas` is handle,
    count, ids..., again and again; `cancels` are handles whose KV is to be sent no further. A stage copies the KV of a
    retracted handle to host memory and forgets its pages, which stay its own until every stage says `copied`; it
    copies it back into the first of the pages that a resumed handle has by then, and says `restored`."""

    number: int
    drops: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()
    retracts: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()
    page_deltas: Ints = field(default_factory=lambda: EMPTY)
    step: Step | None = None


def pack_deltas(deltas: dict[int, list[int]]) -> Ints:
    """handle -> new page ids, as one flat int64 array."""
    flat: list[int] = []
    for handle, pages in deltas.items():
        flat += (handle, len(pages), *pages)
    return np.array(flat, dtype=np.int64)


def unpack_deltas(flat: Ints) -> list[tuple[int, list[int]]]:
    """The inverse of `pack_deltas`. Raises ValueError if the counts do not add up."""
    values, at, deltas = flat.tolist(), 0, []
    while at < len(values):
        count = values[at + 1] if at + 1 < len(values) else -1
        if count < 0 or at + 2 + count > len(values):
            raise ValueError("page deltas are cut short")
        deltas.append((values[at], values[at + 2 : at + 2 + count]))
        at += 2 + count
    return deltas
