"""Decode steps as CUDA graphs: one for each slot of the ring and each size of batch, captured at start.

host:   fill (pinned) --copies, on a stream of their own--> inputs and plan of attention on the device
device: ids or activations --> [graph: all layers] --> activations, or logits and greedy ids

Copies of a step lie under the step before it: between two graphs each would cost the device ten times its own time. A
slot's buffers are used again only once its step has come back, which the head sees to; so nothing here waits. The rows
that pad a batch up to its bucket read page 0 and write nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stagemesh.shared.model.cuda.decode_attention import DecodeAttention
from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.rows import DecodeRows, buckets_up_to

WORKSPACE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """`hidden` [B, hidden] or, on the last stage, `logits` [B, vocab] and `greedy` int64 [B], on the device. `hidden`
    and `greedy` are overwritten by the next step of the same slot, `logits` by whatever the stream does next."""

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
        self._inputs = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._sampled = None if sampled is None else sampled.view(-1)
        self._buckets = buckets_up_to(max_rows)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._slots = [_Slot(model, pool, max_rows, workspace, inbox, number) for number in range(num_slots)]
        self._memory: Any = None

    def capture(self, stream: torch.cuda.Stream, progress: Callable[[int, int], None]) -> None:
        """Compiles what is not compiled yet, then captures every graph. Takes seconds. The largest first, so that the
        smaller ones find room in its memory. What they read was made on the default stream, which nothing else here
        waits for."""
        total = len(self._slots) * len(self._buckets)
        done = 0
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for bucket in reversed(self._buckets):
                for slot in self._slots:
                    slot.fill(_warm_up_rows(bucket), bucket)
                    self._forward(slot, bucket)
                    if self._graphs:
                        stream.synchronize()
                        self._capture(slot, bucket, stream)
                    done += 1
                    progress(done, total)
            stream.synchronize()

    def prepare(self, number: int, rows: DecodeRows) -> None:
        """Plans the attention of step `number`, and enqueues its inputs beside what the current stream has to do, which
        goes on from here when they are there."""
        bucket, slot = self._bucket(len(rows.positions)), self._slots[number % len(self._slots)]
        with torch.cuda.stream(self._inputs):
            slot.fill(rows, bucket)
            slot.filled.record()
        torch.cuda.current_stream().wait_event(slot.filled)

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

    def _forward(self, slot: _Slot, bucket: int) -> DecodeOutput:
        model, inputs = self._model, slot.device_rows(bucket)
        if model.first:
            assert self._sampled is not None
            hidden = model.embed(inputs.sources, inputs.literals, self._sampled, slot.hidden[:bucket])
        else:
            assert slot.inbox is not None
            hidden = slot.hidden[:bucket].copy_(slot.inbox[:bucket])
        attention = slot.attention(bucket)

        def attend(layer: int, query: Tensor) -> Tensor:
            view = self._pool[:, layer]
            return attention.run(query, view[:, 0], view[:, 1])

        hidden, delta = model.run_layers(hidden, inputs.positions, inputs.slots, self._pool, attend)
        if not model.last:
            return DecodeOutput(hidden=hidden if delta is None else hidden.add_(delta))
        logits = model.logits(hidden, delta)
        return DecodeOutput(logits=logits, greedy=torch.argmax(logits, dim=-1, out=slot.greedy[:bucket]))


@dataclass(frozen=True, slots=True)
class _DeviceRows:
    sources: Tensor
    literals: Tensor
    positions: Tensor
    slots: Tensor


class _Slot:
    """Buffers of one slot: the packed inputs in pinned memory and on the device, attention's state for each bucket, and
    `hidden` [rows, hidden] and `greedy` int64 [rows], which steps leave. What a graph allocates is no place for these:
    it may lie where another one, captured before, has its intermediate results."""

    def __init__(
        self,
        model: CudaStageModel,
        pool: Tensor,
        max_rows: int,
        workspace: Tensor,
        inbox: Tensor | None,
        number: int,
    ) -> None:
        self._model, self._page_size, num_pages = model, pool.shape[3], len(pool)
        self._most, self._workspace = max_rows, workspace
        self.inbox = None if inbox is None else inbox[number]
        self._header = 6 * max_rows + 1  # sources, literals, positions, slots, indptr, last page lengths
        size = self._header + num_pages + max_rows
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.int32, device="cuda")
        self.indices = self._device[self._header :]
        self.hidden = torch.empty(max_rows, model.config.hidden_size, dtype=model.dtype, device="cuda")
        self.greedy = torch.empty(max_rows, dtype=torch.int64, device="cuda")
        self.filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._attention: dict[int, DecodeAttention] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, DecodeOutput] = {}

    def _part(self, packed: Tensor, part: int, count: int) -> Tensor:
        return packed[part * self._most : part * self._most + count]

    def fill(self, rows: DecodeRows, bucket: int) -> None:
        """Packs `rows`, padded up to `bucket`, and enqueues their copy to the device and that of attention's plan."""
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
        self.attention(bucket).plan(self._part(self._host, 4, bucket + 1), self._last(self._host, bucket))

    def device_rows(self, bucket: int) -> _DeviceRows:
        return _DeviceRows(*(self._part(self._device, part, bucket) for part in range(4)))

    def attention(self, bucket: int) -> DecodeAttention:
        if bucket not in self._attention:
            self._attention[bucket] = DecodeAttention(
                self._model.config,
                self._model.dtype,
                self._page_size,
                self._workspace,
                indptr=self._part(self._device, 4, bucket + 1),
                indices=self.indices,
                last=self._last(self._device, bucket),
            )
        return self._attention[bucket]

    def _last(self, packed: Tensor, bucket: int) -> Tensor:
        start = 5 * self._most + 1
        return packed[start : start + bucket]


def _warm_up_rows(bucket: int) -> DecodeRows:
    """Rows that all read page 0 and write nothing."""
    zeros, ones, none = (np.full(bucket, value, dtype=np.int32) for value in (0, 1, -1))
    return DecodeRows(none, zeros, zeros, none, ones, ones, zeros)
