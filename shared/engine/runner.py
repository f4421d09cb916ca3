"""Runs steps on one stage: the page tables of its sequences, and the batch that a step means to the model.

Called by one thread only. Everything that changes its state comes with a command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stagemesh.shared.core.commands import (
    COUNT,
    FLAGS,
    FROM_STEP,
    HANDLE,
    NO_LOGPROBS,
    SAMPLE,
    SOURCE_ROW,
    SOURCE_STEP,
    START,
    Command,
    Ints,
    Join,
    RowLogprobs,
    Step,
    TokenLogprobs,
    unpack_deltas,
)
from stagemesh.shared.engine.host_copies import CpuPageCopier, HostCopies
from stagemesh.shared.engine.sampler import RowSampling, log_probabilities, sample
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.model.batch import ForwardBatch
from stagemesh.shared.model.layers import StageModel


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`tensor` is [tokens, hidden_size] or, on the last stage, int64 [rows]: the sampled id or -1."""

    tensor: Tensor
    logprobs: RowLogprobs = field(default_factory=lambda: NO_LOGPROBS)


@dataclass(slots=True)
class _Resident:
    sampling: RowSampling
    logprobs: int | None
    pages: list[int] = field(default_factory=list)


class StageRunner:
    """One stage's layers over its pool `[num_pages, layers, 2, page_size, kv_heads, head_dim]`. `copies` takes the KV
    of retracted sequences; None: the pool is in host memory, and none are expected."""

    def __init__(
        self, model: StageModel, pool: Tensor, *, first: bool, last: bool, copies: HostCopies | None = None
    ) -> None:
        self._model, self._pool, self._first, self._last = model, pool, first, last
        self.copies = HostCopies(CpuPageCopier(pool), 0) if copies is None else copies
        self._page_size = pool.shape[3]
        self._residents: dict[int, _Resident] = {}

    @property
    def num_residents(self) -> int:
        return len(self._residents)

    def pages_of(self, handle: int) -> list[int]:
        return self._residents[handle].pages

    def apply(self, command: Command) -> None:
        """Everything of a command but its step. Raises ProtocolViolation for a handle that is not here, or whose KV is
        being copied."""
        for handle in command.drops:
            self._resident(handle)
            self.copies.drop(handle)
            del self._residents[handle]
        for join in command.joins:
            self._residents[join.handle] = _Resident(_row_sampling(join), join.sampling.logprobs)
        for handle in command.retracts:
            resident = self._resident(handle)
            self.copies.save(handle, resident.pages)
            resident.pages = []
        for handle, pages in unpack_deltas(command.page_deltas):
            self._resident(handle).pages.extend(pages)
        for handle in command.resumes:
            self.copies.load(handle, self._resident(handle).pages)

    def run(self, step: Step, *, hidden: Tensor | None, sampled: Mapping[int, Ints]) -> StepOutput:
        """One forward. `hidden` [tokens, hidden_size] on every stage but the first; `sampled`, step number -> its ids,
        on the first."""
        batch = self._batch(step)
        inputs = torch.from_numpy(input_ids(step, sampled)) if self._first else hidden
        assert inputs is not None
        with torch.inference_mode():
            output = self._model.forward(inputs, batch, self._pool)
            return self._sample(step, output) if self._last else StepOutput(output)

    def _batch(self, step: Step) -> ForwardBatch:
        rows = step.rows
        starts, counts = rows[:, START], rows[:, COUNT]
        residents = [
            self._runnable(handle, end)
            for handle, end in zip(rows[:, HANDLE].tolist(), (starts + counts).tolist(), strict=True)
        ]
        table = np.zeros((len(rows), max(len(r.pages) for r in residents)), dtype=np.int64)
        for entries, resident in zip(table, residents, strict=True):
            entries[: len(resident.pages)] = resident.pages
        row_of = np.repeat(np.arange(len(rows)), counts)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
        pages = table[row_of, positions // self._page_size]
        slots = pages * self._page_size + positions % self._page_size
        wanted = (ends - 1)[(rows[:, FLAGS] & SAMPLE) != 0]
        used = int((starts + counts).max() - 1) // self._page_size + 1
        return ForwardBatch(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_lens=tuple(counts.tolist()),
            context_lens=tuple((starts + counts).tolist()),
            page_table=torch.from_numpy(np.ascontiguousarray(table[:, :used])),
            logit_rows=torch.from_numpy(wanted),
        )

    def _sample(self, step: Step, logits: Tensor) -> StepOutput:
        rows = step.rows
        sampled = np.flatnonzero(rows[:, FLAGS] & SAMPLE)
        ids = torch.full((len(rows),), -1, dtype=torch.int64)
        if not len(sampled):
            return StepOutput(ids)
        residents = [self._residents[handle] for handle in rows[sampled, HANDLE].tolist()]
        positions = (rows[sampled, START] + rows[sampled, COUNT]).tolist()
        drawn = sample(logits, [resident.sampling for resident in residents], positions)
        ids[torch.from_numpy(sampled)] = drawn
        wanted = {row: r.logprobs for row, r in enumerate(residents) if r.logprobs is not None}
        if not wanted:
            return StepOutput(ids)
        at = list(wanted)
        told = log_probabilities(logits[at], drawn[at].tolist(), list(wanted.values()))
        return StepOutput(ids, {int(sampled[r]): TokenLogprobs(*t) for r, t in zip(at, told, strict=True)})

    def _runnable(self, handle: int, num_tokens: int) -> _Resident:
        """One with pages for `num_tokens`, and their KV in them."""
        resident = self._resident(handle)
        if handle in self.copies:
            raise ProtocolViolation(f"a step names sequence {handle}, whose KV is not all here")
        if num_tokens > (room := len(resident.pages) * self._page_size):
            raise ProtocolViolation(f"a step takes sequence {handle} to {num_tokens} tokens, its pages hold {room}")
        return resident

    def _resident(self, handle: int) -> _Resident:
        resident = self._residents.get(handle)
        if resident is None:
            raise ProtocolViolation(f"a command names sequence {handle}, which is not on this stage")
        return resident


def input_ids(step: Step, sampled: Mapping[int, Ints]) -> Ints:
    """The ids that the first stage runs, int64 [tokens]: literal ones, and those that earlier steps have sampled."""
    from_step = (step.rows[:, FLAGS] & FROM_STEP) != 0
    counts = step.rows[:, COUNT]
    ids = np.empty(int(counts.sum()), dtype=np.int64)
    pointing = np.repeat(from_step, counts)
    ids[~pointing] = step.tokens
    sources = step.rows[from_step]
    ids[pointing] = [sampled[number][row] for number, row in sources[:, [SOURCE_STEP, SOURCE_ROW]].tolist()]
    return ids


def _row_sampling(join: Join) -> RowSampling:
    params = join.sampling
    return RowSampling(
        params.temperature,
        params.top_k,
        params.top_p,
        params.seed,
        params.min_p,
        banned=params.ending_ids,
        banned_before=join.prompt_tokens + params.min_tokens if params.min_tokens else 0,
    )
