"""Attention of decode steps of one number of rows: planned anew for every step, while the launch in a graph stays."""

from __future__ import annotations

from typing import Any, Final

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.page import get_seq_lens
from torch import Tensor

from stagemesh.shared.model.config import ModelConfig

BLOCKS_A_PROCESSOR: Final = 2
"""As flashinfer counts them when it splits rows."""
NO_FIXED_SIZE: Final = -1  # of the parts of a row that is split


class DecodeAttention:
    """flashinfer's, over buffers on the device: `indptr` int32 [rows + 1], `indices` int32 [pages] and `last` int32
    [rows].

    A few rows are split over the card, and their parts merged by a kernel of its own. In a graph flashinfer counts on
    that whatever the rows are. Where there are too many to be split, this plans them as `whole`: no parts, no merging.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        page_size: int,
        workspace: Tensor,
        *,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
    ) -> None:
        processors = torch.cuda.get_device_properties(workspace.device).multi_processor_count
        self._rows = len(last)
        self.whole = self._rows > BLOCKS_A_PROCESSOR * processors // config.num_kv_heads
        self._planned = False
        self._shape: dict[str, Any] = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": page_size,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        }
        self._indices = indices
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
        )

    def plan(self, indptr: Tensor, last: Tensor) -> None:
        """For the rows of the next step, `indptr` and `last` on the host. Enqueues a copy on the current stream; the
        plan of the step before must have been used."""
        wrapper, indices = self._wrapper, self._indices[: int(indptr[-1])]
        if not self._planned:
            self._planned = True
            wrapper.plan(indptr, indices, last, **self._shape)
        elif not self.whole:
            fast_decode_plan(wrapper, indptr, indices, last, global_override_indptr_cpu=indptr, **self._shape)
        if self.whole:  # after the first `plan`, which loads the kernels, and whose copy this one's follows
            self._plan_whole(indptr, last)

    def _plan_whole(self, indptr: Tensor, last: Tensor) -> None:
        """As `fast_decode_plan`, but as if for no graph: there is one block of work for each row and head, always."""
        wrapper, shape, rows = self._wrapper, self._shape, self._rows
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.arange(rows + 1, dtype=torch.int32),
            indptr,
            get_seq_lens(indptr, last, shape["page_size"]),
            rows,
            rows,
            shape["num_qo_heads"],
            shape["num_kv_heads"],
            shape["page_size"],
            False,  # for no graph
            shape["head_dim"],
            shape["head_dim"],
            False,  # not causal
            shape["window_left"],
            NO_FIXED_SIZE,
            True,  # rows are not split
            0,  # blocks that others need
        )

    def run(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads, head_dim] of `query` of that shape over strided views [pages, page, kv_heads, head_dim]."""
        out: Tensor = self._wrapper.run(query, (keys, values))
        return out
