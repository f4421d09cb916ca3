"""What frames a step on the device: its events, and pinned memory for the ids that it samples. Used again and again.

A pinned tensor that is let go records an event on the stream that wrote to it, and an event is destroyed in the driver:
where the device has as much in its queue as it takes, both wait for it, and PyTorch holds the interpreter meanwhile. So
nothing is made or let go from step to step, and the calls are those of the CUDA bindings, which let the interpreter go.
PyTorch does not know of these copies: a frame is kept until its `done` has come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stagemesh.shared.core.commands import Ints
from stagemesh.shared.link.cuda_ring import checked

BLOCKING_SYNC: Final = 1  # cudaEventBlockingSync: who waits sleeps


@dataclass(frozen=True, slots=True)
class Frame:
    """`begun` and `computed` are around what the device computes, `done` is behind all that it does for the step.
    `ids`: pinned int64 [most]."""

    begun: Any
    computed: Any
    done: Any
    ids: Tensor


class Frames:
    """Of one stage. One thread takes them, another gives them back."""

    def __init__(self, most_ids: int) -> None:
        from cuda.bindings import runtime

        self._runtime, self._most = runtime, most_ids
        self._free: deque[Frame] = deque()

    def take(self) -> Frame:
        """One that nobody uses; a new one if there is none. Bounded by the steps that are out at once."""
        if self._free:
            return self._free.popleft()
        begun, computed, done = (
            checked(self._runtime.cudaEventCreateWithFlags(BLOCKING_SYNC), "cudaEventCreateWithFlags") for _ in range(3)
        )
        return Frame(begun, computed, done, torch.empty(self._most, dtype=torch.int64, pin_memory=True))

    def give_back(self, frame: Frame) -> None:
        self._free.append(frame)

    def record(self, event: Any, stream: torch.cuda.Stream) -> None:
        checked(self._runtime.cudaEventRecord(event, stream.cuda_stream), "cudaEventRecord")

    def follow(self, stream: torch.cuda.Stream, event: Any) -> None:
        """`stream` goes on once `event`, as recorded last, has come."""
        checked(self._runtime.cudaStreamWaitEvent(stream.cuda_stream, event, 0), "cudaStreamWaitEvent")

    def wait(self, event: Any) -> None:
        """Until the device is through with what comes before it."""
        checked(self._runtime.cudaEventSynchronize(event), "cudaEventSynchronize")

    def between_ms(self, first: Any, then: Any) -> float:
        """By the device's clock. Both have come."""
        return float(checked(self._runtime.cudaEventElapsedTime(first, then), "cudaEventElapsedTime"))

    def copy_ids(self, frame: Frame, sampled: Tensor, stream: torch.cuda.Stream) -> None:
        """Enqueues the copy of int64 [n] ids on the device into the frame; `n` is at most what frames have room for."""
        assert sampled.dtype == torch.int64, sampled.dtype
        assert sampled.ndim == 1, sampled.shape
        assert len(sampled) <= self._most, (len(sampled), self._most)
        ids, size = frame.ids[: len(sampled)], sampled.numel() * sampled.element_size()
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        copied = self._runtime.cudaMemcpyAsync(ids.data_ptr(), sampled.data_ptr(), size, kind, stream.cuda_stream)
        checked(copied, "cudaMemcpyAsync")

    def ids(self, frame: Frame, count: int) -> Ints:
        """Those of a frame whose `done` has come; a copy."""
        ids: Ints = frame.ids[:count].numpy().copy()
        return ids

    def close(self) -> None:
        """Those that nobody uses."""
        while self._free:
            frame = self._free.popleft()
            for event in (frame.begun, frame.computed, frame.done):
                self._runtime.cudaEventDestroy(event)
