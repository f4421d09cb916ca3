"""What one stage on a GPU does with a step: enqueues it, and tells nothing yet. Everything here runs on the forward
thread, under the stage's computing stream, which decode's inputs reach from a stream of their own. Nothing waits for
the device, except where a row asks for more than greedy ids (a draw, log probabilities, tokens that must not come yet),
whose filters look at values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from stagemesh.shared.core.commands import COUNT, HANDLE, NO_LOGPROBS, START, RowLogprobs, Step
from stagemesh.shared.engine.device_rows import chunk_rows, decode_rows
from stagemesh.shared.engine.host_copies import HostCopies
from stagemesh.shared.engine.logit_rows import LogitRows, logit_rows
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.model.cuda.decode import DecodeGraphs, DecodeOutput
from stagemesh.shared.model.cuda.layers import CudaStageModel
from stagemesh.shared.model.cuda.prefill import PrefillForward
from stagemesh.shared.model.cuda.rows import ChunkRows

if TYPE_CHECKING:
    from stagemesh.shared.model.layers import StageModel


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A step on its way through the device. `tensor`: [tokens, hidden] for the next stage or, on the last, int64
    [rows], the sampled id or -1."""

    tensor: Tensor
    logprobs: RowLogprobs


class CudaStageRunner(StageRunner):
    """One stage's layers over its pool on the current device. `graphs` on decode stages, `chunks` on prefill ones."""

    def __init__(
        self,
        model: CudaStageModel,
        pool: Tensor,
        copies: HostCopies,
        *,
        num_slots: int,
        max_rows: int,
        graphs: DecodeGraphs | None,
        chunks: PrefillForward | None,
    ) -> None:
        super().__init__(cast("StageModel", model), pool, first=model.first, last=model.last, copies=copies)
        self._num_slots, self._max_rows, self.dtype = num_slots, max_rows, model.dtype
        self._graphs, self._chunks = graphs, chunks

    def prepare(self, step: Step) -> Callable[[Tensor | None], Enqueued]:
        """Enqueues what does not wait for the step's inputs. The call of what it returns enqueues the forward pass:
        `hidden` [tokens, hidden] of the previous stage is overwritten; decode takes it from its slot instead."""
        with torch.inference_mode():
            if self._graphs is not None:
                self._graphs.prepare(
                    step.number,
                    decode_rows(step, self._pages, self._page_size, num_slots=self._num_slots, max_rows=self._max_rows),
                )
                return partial(self._decode, self._graphs, step)
            assert self._chunks is not None
            rows = chunk_rows(step, self._pages, self._page_size)
            self._chunks.plan(step.number, rows)
            return partial(self._prefill, self._chunks, step, rows)

    @torch.inference_mode()
    def _decode(self, graphs: DecodeGraphs, step: Step, hidden: Tensor | None) -> Enqueued:
        output = graphs.run(step.number, len(step.rows))
        if output.hidden is not None:
            return Enqueued(output.hidden, NO_LOGPROBS)
        return self._decoded(step, output)

    def _decoded(self, step: Step, output: DecodeOutput) -> Enqueued:
        assert output.logits is not None
        assert output.greedy is not None
        wanted = logit_rows(step.rows)
        if self._is_plain(step, wanted):
            return Enqueued(output.greedy, NO_LOGPROBS)
        return self._sampled(step, wanted, output.logits)

    @torch.inference_mode()
    def _prefill(self, chunks: PrefillForward, step: Step, rows: ChunkRows, hidden: Tensor | None) -> Enqueued:
        wanted = logit_rows(step.rows)
        output = chunks.run(step.number, rows, token_ids=step.tokens if self._first else None, hidden=hidden)
        if not self._last:
            return Enqueued(output, NO_LOGPROBS)
        if not self._is_plain(step, wanted):
            return self._sampled(step, wanted, output)
        return Enqueued(chunks.greedy_ids(step.number, len(step.rows), wanted.sampled, output), NO_LOGPROBS)

    def _is_plain(self, step: Step, wanted: LogitRows) -> bool:
        """True if every sampled row takes the likeliest id and no row tells more."""
        if len(wanted.told):
            return False
        handles = step.rows[wanted.sampled, HANDLE].tolist()
        ends = (step.rows[wanted.sampled, START] + step.rows[wanted.sampled, COUNT]).tolist()
        residents = (self._residents[handle] for handle in handles)
        return all(
            r.sampling.temperature == 0 and r.logprobs is None and r.output is None and end >= r.sampling.banned_before
            for r, end in zip(residents, ends, strict=True)
        )

    def _sampled(self, step: Step, wanted: LogitRows, logits: Tensor) -> Enqueued:
        """`logits` [R, vocab] of the tokens `wanted`."""
        return Enqueued(*self._draw(step, wanted, logits.float()))

    def _pages(self, handle: int, end: int) -> list[int]:
        return self._runnable(handle, end).pages
