"""Decode steps as CUDA graphs: one for each slot of the ring and each size of batch, captured at start.

host:   fill (pinned) --one copy--> inputs on the device      plan: how attention is split over the card
device: ids or activations --> [graph: all layers] --> activations, or logits and greedy ids

A slot's buffers are used again only once its step has come back, which the head sees to; so nothing here waits. The
rows that pad a batch up to its bucket read page 0 and write nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from torch import Tensor

from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.rows import DecodeRows, buckets_up_to

WORKSPACE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """`hidden` [B, hidden] or, on the last stage, `logits` [B, vocab] and `greedy` int64 [B]. On the device, and
    overwritten by the next step of the same slot."""

    hidden: Tensor | None = None
    logits: Tensor | None = None
    greedy: Tensor | None = None


class DecodeGraphs:
    """`max_rows` rows a step at most. `inbox`: [num_slots, max_rows, hidden] of activations that come from the previous
    stage, or None on the first; `sampled`: int64 [num_slots, max_rows] of ids that come from the last, on the first."""

    def __init__(
        self,
        model: CudaStageModel,
        pool: Tensor,
        *,
        num_slots: int,
        max_rows: int,
        inbox: Tensor | None,
        sampled: Tensor | None,
        graphs: bool = True,
    ) -> None:
        self._model, self._pool, self._graphs = model, pool, graphs
        self._sampled = None if sampled is None else sampled.view(-1)
        self._buckets = buckets_up_to(max_rows)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._slots = [_Slot(max_rows, len(pool), workspace, inbox, number) for number in range(num_slots)]
        self._memory: Any = None

    def capture(self, stream: torch.cuda.Stream, progress: Callable[[int, int], None]) -> None:
        """Compiles what is not compiled yet, then captures every graph. Takes seconds. The largest first, so that the
        smaller ones find room in its memory."""
        total = len(self._slots) * len(self._buckets)
        done = 0
        with torch.cuda.stream(stream), torch.inference_mode():
            for bucket in reversed(self._buckets):
                for slot in self._slots:
                    slot.fill(_warm_up_rows(bucket), bucket)
                    self._plan(slot, bucket)
                    self._forward(slot, bucket)
                    if self._graphs:
                        stream.synchronize()
                        self._capture(slot, bucket, stream)
                    done += 1
                    progress(done, total)
            stream.synchronize()

    def prepare(self, number: int, rows: DecodeRows) -> None:
        """Enqueues the inputs of step `number`, and plans its attention."""
        bucket, slot = self._bucket(len(rows.positions)), self._slots[number % len(self._slots)]
        slot.fill(rows, bucket)
        self._plan(slot, bucket)

    def _bucket(self, count: int) -> int:
        return self._buckets[bisect_left(self._buckets, count)]

    def run(self, number: int, count: int) -> DecodeOutput:
        """Enqueues the prepared step `number` of `count` rows on the current stream."""
        bucket, slot = self._bucket(count), self._slots[number % len(self._slots)]
        if self._graphs:
            slot.graphs[bucket].replay()
            output = slot.outputs[bucket]
        else:
            output = self._forward(slot, bucket)
        return DecodeOutput(*(None if t is None else t[:count] for t in (output.hidden, output.logits, output.greedy)))

    def _capture(self, slot: _Slot, bucket: int, stream: torch.cuda.Stream) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            slot.outputs[bucket] = self._forward(slot, bucket)
        self._memory = self._memory or graph.pool()
        slot.graphs[bucket] = graph

    def _plan(self, slot: _Slot, bucket: int) -> None:
        config, page_size = self._model.config, self._pool.shape[3]
        wrapper = slot.wrapper(bucket)
        shared: dict[str, Any] = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": page_size,
            "q_data_type": self._model.dtype,
            "kv_data_type": self._model.dtype,
            "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        }
        indptr, last = slot.host_indptr(bucket), slot.host_last(bucket)
        indices = slot.indices[: int(indptr[-1])]
        if bucket not in slot.planned:
            slot.planned.add(bucket)
            wrapper.plan(indptr, indices, last, **shared)
        else:
            fast_decode_plan(wrapper, indptr, indices, last, global_override_indptr_cpu=indptr, **shared)

    def _forward(self, slot: _Slot, bucket: int) -> DecodeOutput:
        model, inputs = self._model, slot.device_rows(bucket)
        if model.first:
            assert self._sampled is not None
            hidden = model.embed(inputs.sources, inputs.literals, self._sampled)
        else:
            assert slot.inbox is not None
            hidden = slot.inbox[:bucket].clone()
        wrapper = slot.wrapper(bucket)

        def attend(layer: int, query: Tensor) -> Tensor:
            view = self._pool[:, layer]
            out: Tensor = wrapper.run(query, (view[:, 0], view[:, 1]))
            return out

        hidden, delta = model.run_layers(hidden, inputs.positions, inputs.slots, self._pool, attend)
        if not model.last:
            return DecodeOutput(hidden=hidden if delta is None else hidden.add_(delta))
        logits = model.logits(hidden, delta)
        return DecodeOutput(logits=logits, greedy=logits.argmax(dim=-1))


@dataclass(frozen=True, slots=True)
class _DeviceRows:
    sources: Tensor
    literals: Tensor
    positions: Tensor
    slots: Tensor


class _Slot:
    """Buffers of one slot: the packed inputs in pinned memory and on the device, attention's state for each bucket."""

    def __init__(self, max_rows: int, num_pages: int, workspace: Tensor, inbox: Tensor | None, number: int) -> None:
        self._most, self._workspace = max_rows, workspace
        self.inbox = None if inbox is None else inbox[number]
        self._header = 6 * max_rows + 1  # sources, literals, positions, slots, indptr, last page lengths
        size = self._header + num_pages + max_rows
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.int32, device="cuda")
        self.indices = self._device[self._header :]
        self._wrappers: dict[int, Any] = {}
        self.planned: set[int] = set()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, DecodeOutput] = {}

    def _part(self, packed: Tensor, part: int, count: int) -> Tensor:
        return packed[part * self._most : part * self._most + count]

    def fill(self, rows: DecodeRows, bucket: int) -> None:
        """Packs `rows`, padded up to `bucket`, and enqueues their copy to the device."""
        host, most, count = self._host.numpy(), self._most, len(rows.positions)
        parts = (rows.sources, rows.literals, rows.positions, rows.slots)
        for part, (values, filler) in enumerate(zip(parts, (-1, 0, 0, -1), strict=True)):
            at = part * most
            host[at : at + count] = values
            host[at + count : at + bucket] = filler
        counts = np.ones(bucket, dtype=np.int32)
        counts[:count] = rows.page_counts
        indptr = host[4 * most : 4 * most + bucket + 1]
        indptr[0] = 0
        np.cumsum(counts, out=indptr[1:])
        last = host[5 * most + 1 : 5 * most + 1 + bucket]
        last[:] = 1
        last[:count] = rows.last_lengths
        end = self._header + len(rows.pages)
        host[self._header : end] = rows.pages
        host[end : end + bucket - count] = 0
        used = end + bucket - count
        self._device[:used].copy_(self._host[:used], non_blocking=True)

    def device_rows(self, bucket: int) -> _DeviceRows:
        return _DeviceRows(*(self._part(self._device, part, bucket) for part in range(4)))

    def host_indptr(self, bucket: int) -> Tensor:
        return self._part(self._host, 4, bucket + 1)

    def host_last(self, bucket: int) -> Tensor:
        start = 5 * self._most + 1
        return self._host[start : start + bucket]

    def wrapper(self, bucket: int) -> Any:
        if bucket not in self._wrappers:
            start = 5 * self._most + 1
            self._wrappers[bucket] = BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=self._part(self._device, 4, bucket + 1),
                paged_kv_indices_buffer=self.indices,
                paged_kv_last_page_len_buffer=self._device[start : start + bucket],
            )
        return self._wrappers[bucket]


def _warm_up_rows(bucket: int) -> DecodeRows:
    """Rows that all read page 0 and write nothing."""
    zeros, ones, none = (np.full(bucket, value, dtype=np.int32) for value in (0, 1, -1))
    return DecodeRows(none, zeros, zeros, none, ones, ones, zeros)
