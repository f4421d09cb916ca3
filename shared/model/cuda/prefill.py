"""Chunks of prompts on a GPU: no graph, since every chunk has another shape and takes long enough to be launched."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.rows import ChunkRows, Int32s, Ints
from stagemesh.shared.model.cuda.staging import Stage, Staging

WORKSPACE_BYTES: Final = 256 << 20
PER_TOKEN_BYTES: Final = 5 * 8  # ids, positions, slots, those whose logits are asked for, rows that are sampled
PER_PAGE_BYTES: Final = 4
EXTRA_BYTES: Final = 64 << 10  # what a row takes, for more than a thousand of them


class PrefillForward:
    """For one stream. Attention's plan of a chunk lies in pinned memory until the device has read it, and so does what
    is sent with it; there are as many of both as steps outstanding: a step's is `number % num_slots`."""

    def __init__(self, model: CudaStageModel, pool: Tensor, num_slots: int, most_tokens: int) -> None:
        """`most_tokens` of a chunk."""
        self._model, self._pool = model, pool
        self._staging = Staging(num_slots, PER_TOKEN_BYTES * most_tokens + PER_PAGE_BYTES * len(pool) + EXTRA_BYTES)
        self._stages: list[Stage] = [self._staging.begin(number) for number in range(num_slots)]
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._wrappers: list[Any] = [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in range(num_slots)]

    def run(self, number: int, rows: ChunkRows, *, token_ids: Ints | None, hidden: Tensor | None) -> Tensor:
        """Enqueues the planned chunk on the current stream. Takes ids [T] on the first stage, else `hidden`
        [T, hidden], which is overwritten. Returns [T, hidden] or, on the last stage, logits [R, vocab]."""
        slot = number % len(self._stages)
        model, wrapper, stage = self._model, self._wrappers[slot], self._stages[slot]
        if token_ids is not None:
            assert model.weights.embedding is not None
            hidden = model.weights.embedding.index_select(0, stage.sent(token_ids))
        assert hidden is not None

        def attend(layer: int, query: Tensor) -> Tensor:
            view = self._pool[:, layer]
            out: Tensor = wrapper.run(query, (view[:, 0], view[:, 1]))
            return out

        hidden, delta = model.run_layers(hidden, stage.sent(rows.positions), stage.sent(rows.slots), self._pool, attend)
        assert delta is not None
        if not model.last:
            return hidden.add_(delta)
        if not len(rows.wanted):  # no prompt ends with this chunk
            return hidden.new_empty(0, model.config.vocab_size)
        wanted = stage.sent(rows.wanted)
        return model.logits(hidden.index_select(0, wanted), delta.index_select(0, wanted))

    def warm_up(self, most: int) -> None:
        """Runs a small chunk and one of about `most` tokens, which write nothing, so that the first prompts find every
        kernel loaded. On the current stream, once the default one has made what they read."""
        model, longest = self._model, min(self._model.config.max_context, self._pool.shape[3] * len(self._pool))
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for count in (min(16, most), most):
            rows = _idle_rows(max(1, count // longest), min(count, longest), self._pool.shape[3])
            tokens = len(rows.positions)
            self.plan(0, rows)
            hidden = torch.zeros(tokens, model.config.hidden_size, dtype=model.dtype, device="cuda")
            ids = np.zeros(tokens, dtype=np.int64) if model.first else None
            output = self.run(0, rows, token_ids=ids, hidden=hidden)
            if model.last:
                self.greedy_ids(0, len(rows.query_lens), np.arange(len(rows.wanted)), output)
            torch.cuda.current_stream().synchronize()  # the next one has the same slot

    def greedy_ids(self, number: int, count: int, wanted: Ints, logits: Tensor) -> Tensor:
        """int64 [count]: the likeliest id of each row in `wanted` by `logits` [R, vocab], -1 in the others. Of step
        `number`, which has run."""
        ids = torch.full((count,), -1, dtype=torch.int64, device="cuda")
        if len(wanted):
            ids[self._stages[number % len(self._stages)].sent(wanted)] = logits.argmax(dim=-1)
        return ids

    def plan(self, number: int, rows: ChunkRows) -> None:
        """Prepares attention for the `run` of step `number`."""
        config, page_size = self._model.config, self._pool.shape[3]
        slot = number % len(self._stages)
        stage = self._stages[slot] = self._staging.begin(number)
        self._wrappers[slot].plan(
            stage.pinned(_indptr(rows.query_lens)),
            stage.pinned(_indptr(rows.page_counts)),
            stage.pinned(rows.pages.astype(np.int32)),
            stage.pinned(((rows.context_lens - 1) % page_size + 1).astype(np.int32)),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            page_size,
            causal=True,
            window_left=-1 if config.sliding_window is None else config.sliding_window - 1,
            q_data_type=self._model.dtype,
            kv_data_type=self._model.dtype,
        )


def _indptr(counts: Ints) -> Int32s:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _idle_rows(num_rows: int, length: int, page_size: int) -> ChunkRows:
    """Rows of `length` tokens that all read the first pages and write nothing."""
    pages = -(-length // page_size)
    each = np.full(num_rows, length)
    return ChunkRows(
        positions=np.tile(np.arange(length), num_rows),
        slots=np.full(num_rows * length, -1),
        query_lens=each,
        context_lens=each,
        page_counts=np.full(num_rows, pages),
        pages=np.tile(np.arange(pages), num_rows),
        wanted=np.cumsum(each) - 1,
    )
