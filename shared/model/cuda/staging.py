"""Pinned memory for what a step sends to its GPU, the same for every step of a slot.

Pinned memory of PyTorch's that is let go records an event on its stream, which waits for the device where the device's
queue is full, with the interpreter held; and memory that it has not had before waits for the device as well.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT: Final = 256  # bytes


class Staging:
    """`num_slots` of `num_bytes`. A slot is written to again only once its step has come back, which the head sees
    to."""

    def __init__(self, num_slots: int, num_bytes: int, *, pin: bool = True) -> None:
        """`pin` is for tests without a GPU."""
        self._memory = torch.empty(num_slots, aligned(num_bytes), dtype=torch.uint8, pin_memory=pin)

    def begin(self, number: int) -> Stage:
        """Step `number` has its slot for itself, from the start."""
        return Stage(self._memory[number % len(self._memory)])


class Stage:
    """Of one step."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0

    def pinned(self, values: npt.NDArray[Any]) -> Tensor:
        """A copy of `values` here; in memory of its own, if there is no room."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        end = self._used + values.nbytes
        if end > len(self._memory):
            return source.pin_memory()
        copied = self._memory[self._used : end].view(source.dtype)
        copied.copy_(source)
        self._used = aligned(end)
        return copied

    def sent(self, values: npt.NDArray[Any]) -> Tensor:
        """The values on the device; the copy is enqueued, and the host does not wait."""
        return self.pinned(values).to("cuda", non_blocking=True)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
