"""Runs steps on one stage: the page tables of its sequences, and the batch that a step means to the model.

Called by one thread only. Everything that changes its state comes with a command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from stagemesh.shared.engine.grammar import Grammars
from stagemesh.shared.engine.host_copies import CpuPageCopier, HostCopies
from stagemesh.shared.engine.logit_rows import LogitRows, logit_rows
from stagemesh.shared.engine.output_state import OutputState, shape_logits
from stagemesh.shared.engine.sampler import RowSampling, log_probabilities, prompt_log_probabilities, sample
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
    """`output` is there on the last stage where draws depend on more than the logits; the grammar in it minds what is
    banned itself. `carried`: the logits of the last prompt token so far, if the next one's log probability is asked."""

    sampling: RowSampling
    logprobs: int | None
    prompt_logprobs: int | None = None
    output: OutputState | None = None
    carried: Tensor | None = None
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
        self.grammars: Grammars | None = None  # on the last stage, once a structure has been prepared

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
            self._residents[join.handle] = self._new_resident(join)
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
        used = int((starts + counts).max() - 1) // self._page_size + 1
        return ForwardBatch(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_lens=tuple(counts.tolist()),
            context_lens=tuple((starts + counts).tolist()),
            page_table=torch.from_numpy(np.ascontiguousarray(table[:, :used])),
            logit_rows=torch.from_numpy(logit_rows(rows).tokens),
        )

    def _sample(self, step: Step, logits: Tensor) -> StepOutput:
        return StepOutput(*self._draw(step, logit_rows(step.rows), logits))

    def _draw(self, step: Step, wanted: LogitRows, logits: Tensor) -> tuple[Tensor, RowLogprobs]:
        """The id of each row of the step or -1, int64 [rows] on the device of `logits` [R, vocab], which are those of
        the tokens `wanted`; and what rows tell."""
        ids = torch.full((len(step.rows),), -1, dtype=torch.int64, device=logits.device)
        prompts = self._tell_prompts(step, wanted, logits)
        if not len(wanted.sampled):
            return ids, prompts
        if len(wanted.tokens) > len(wanted.sampled):
            logits = logits.index_select(0, torch.from_numpy(wanted.drawn_at).to(logits.device))
        rows = step.rows[wanted.sampled]
        residents = [self._residents[handle] for handle in rows[:, HANDLE].tolist()]
        positions = (rows[:, START] + rows[:, COUNT]).tolist()
        drawn = sample(self._shaped(step, wanted, residents, logits), [r.sampling for r in residents], positions)
        ids[torch.from_numpy(wanted.sampled).to(ids.device)] = drawn
        telling = {row: r.logprobs for row, r in enumerate(residents) if r.logprobs is not None}
        states = [r.output for r in residents]
        if not telling and not any(states):
            return ids, prompts
        chosen = drawn.tolist()
        failed: dict[int, TokenLogprobs] = {}
        for row, state, token_id in zip(wanted.sampled.tolist(), states, chosen, strict=True):
            if state is None:
                continue
            if state.failure:
                failed[row] = TokenLogprobs(0.0, failure=state.failure)
            state.drawn(token_id)  # of a failed one too: its next step may be out already
        at = list(telling)
        told = log_probabilities(logits[at], [chosen[row] for row in at], list(telling.values())) if at else []
        own = {int(wanted.sampled[row]): TokenLogprobs(*said) for row, said in zip(at, told, strict=True)}
        return ids, {**_merged(own, prompts), **failed}

    def _shaped(self, step: Step, wanted: LogitRows, residents: list[_Resident], logits: Tensor) -> Tensor:
        """`logits` [R, vocab] of the rows that draw, with bias, penalties and grammar."""
        if not any(r.output is not None for r in residents):
            return logits
        firsts = _literal_places(step)
        positions, banned = [], []
        for row, resident in zip(wanted.sampled.tolist(), residents, strict=True):
            _, start, count, *_, flags = step.rows[row].tolist()
            if resident.output is not None and not flags & FROM_STEP:
                resident.output.feed(start, step.tokens[firsts[row] : firsts[row] + count].tolist())
            positions.append(start + count)
            banned.append(resident.sampling.banned if start + count < resident.sampling.banned_before else ())
        return shape_logits(logits, [r.output for r in residents], positions, banned)

    def _tell_prompts(self, step: Step, wanted: LogitRows, logits: Tensor) -> dict[int, TokenLogprobs]:
        """Log probabilities of the prompts' tokens, by row. That of a chunk's first token is in the logits of the one
        before it, which an earlier chunk has computed."""
        told: dict[int, TokenLogprobs] = {}
        firsts = _literal_places(step) if len(wanted.told) else ()
        ends = np.cumsum(step.rows[:, COUNT])
        for row in wanted.told.tolist():
            handle, _, count, *_, flags = step.rows[row].tolist()
            resident = self._residents[handle]
            at = int(np.searchsorted(wanted.tokens, ends[row] - count))
            own, tokens = logits[at : at + count], step.tokens[firsts[row] : firsts[row] + count].tolist()
            before = own[:-1] if resident.carried is None else torch.cat((resident.carried[None], own[:-1]))
            said = prompt_log_probabilities(before, tokens[count - len(before) :], resident.prompt_logprobs or 0)
            told[row] = TokenLogprobs(0.0, prompt=tuple(TokenLogprobs(*each) for each in said))
            resident.carried = None if flags & SAMPLE else own[-1].clone()
        return told

    def _new_resident(self, join: Join) -> _Resident:
        params, output = join.sampling, None
        sampling = _row_sampling(join)
        if self._last and (params.needs_output or params.logit_bias):
            matcher = None
            if params.structure is not None and self.grammars is not None:
                matcher = self.grammars.matcher(params.structure)
            output = OutputState(params, join.prompt_tokens, matcher)
        return _Resident(sampling, params.logprobs, params.prompt_logprobs, output)

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
        has_grammar=params.structure is not None,
    )


def _literal_places(step: Step) -> Ints:
    """Where the literal ids of each row begin in `step.tokens`; of no meaning for rows without."""
    counts = np.where(step.rows[:, FLAGS] & FROM_STEP, 0, step.rows[:, COUNT])
    return np.cumsum(counts) - counts


def _merged(own: dict[int, TokenLogprobs], prompts: dict[int, TokenLogprobs]) -> RowLogprobs:
    both = {row: replace(own[row], prompt=told.prompt) for row, told in prompts.items() if row in own}
    return {**prompts, **own, **both}
