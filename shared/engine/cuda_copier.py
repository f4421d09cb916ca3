"""Copies pages between a pool on a GPU and pinned host memory, beside the steps that compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CudaPageCopier:
    """A `PageCopier`. Its stream waits for what is enqueued on the stream of the caller, and for nothing else."""

    def __init__(self, pool: Tensor) -> None:
        """`pool` is [num_pages, layers, 2, page_size, kv_heads, head_dim], contiguous, on the current device."""
        self._pages = pool.flatten(1).view(torch.uint8)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def page_bytes(self) -> int:
        return int(self._pages.shape[1])

    def save(self, pages: Sequence[int]) -> Callable[[], Tensor]:
        enqueued = torch.cuda.current_stream().record_event()

        def move() -> Tensor:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(enqueued)
                gathered = self._pages.index_select(0, torch.tensor(pages, device="cuda"))
                saved = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
                saved.copy_(gathered, non_blocking=True)
                self._stream.synchronize()
            return saved

        return move

    def load(self, saved: Tensor, pages: Sequence[int]) -> Callable[[], None]:
        def move() -> None:
            with torch.cuda.stream(self._stream):
                moved = saved.to("cuda", non_blocking=True)
                self._pages.index_copy_(0, torch.tensor(pages, device="cuda"), moved)
                self._stream.synchronize()

        return move
