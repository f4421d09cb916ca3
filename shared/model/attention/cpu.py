"""Paged attention with plain torch on the CPU.

plan:   row -> pages it can see -> flat indices into the pool, for all layers at once
attend: write K and V -> rows of one token: one padded gather and one call a group; longer rows: one call each

Nothing is read past a row's context except where a group pads, and there the mask gives it no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stagemesh.shared.model.attention.groups import group_rows
from stagemesh.shared.model.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Decode:
    """B rows of one token. tokens: [B], or None if they are all tokens of the step in order. pieces: int64
    [stage_layers, 2, B * P] of the pool's page pieces; mask: [B, 1, 1, P * page_size], 0 or -inf, or None."""

    tokens: Tensor | None
    pieces: Tensor
    mask: Tensor | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One row, tokens [lo, hi) of the step. pieces: int64 [stage_layers, 2, P], or None if the row's whole context is
    in this step. mask: [1, 1, query, context], or None for plain causal."""

    lo: int
    hi: int
    context: int
    pieces: Tensor | None
    mask: Tensor | None


class CpuAttention:
    """Owns scratch memory for gathered pages, so one instance serves one thread."""

    def __init__(self, num_kv_heads: int, head_dim: int, sliding_window: int | None, dtype: torch.dtype) -> None:
        self._kv_heads, self._head_dim = num_kv_heads, head_dim
        self._window, self._dtype = sliding_window, dtype
        self._scratch = torch.empty(0, dtype=dtype)

    def plan(self, batch: ForwardBatch, pool: Tensor) -> CpuPlan:
        """Prepares a forward pass over `batch`; `pool` must be contiguous."""
        _, stage_layers, _, page_size = pool.shape[:4]
        layers = torch.arange(stage_layers)[:, None, None]
        sides = torch.arange(2)[None, :, None]
        pages, offsets = batch.slots // page_size, batch.slots % page_size
        slots = ((pages * stage_layers + layers) * 2 + sides) * page_size + offsets
        spans = [self._span(query, context, page_size) for query, context in _lengths(batch)]
        starts = list(accumulate(batch.query_lens, initial=0))

        def pieces(rows: Sequence[int], num_pages: int) -> Tensor:
            listed = torch.stack([_padded(batch.page_table[row], spans[row][0], num_pages) for row in rows])
            return (listed.reshape(-1) * stage_layers + layers) * 2 + sides

        single = [row for row, length in enumerate(batch.query_lens) if length == 1]
        decodes = []
        for members in group_rows([spans[row][1] for row in single]):
            rows = [single[member] for member in members]
            num_pages = max(spans[row][1] for row in rows)
            bounds = [(spans[row][0] * page_size, batch.context_lens[row]) for row in rows]
            tokens = None if len(rows) == batch.num_tokens else torch.tensor([starts[row] for row in rows])
            mask = self._decode_mask(bounds, num_pages * page_size)
            decodes.append(_Decode(tokens, pieces(rows, num_pages), mask, len(rows)))
        prefills = []
        for row, (query, context) in enumerate(_lengths(batch)):
            if query > 1:
                first_page, num_pages = spans[row]
                start = first_page * page_size
                chosen = None if context == query else pieces([row], num_pages)
                mask = self._prefill_mask(query, context, 0 if chosen is None else start)
                visible = context if chosen is None else context - start
                prefills.append(_Prefill(starts[row], starts[row + 1], visible, chosen, mask))
        return CpuPlan(self, pool, slots.reshape(stage_layers, -1), tuple(decodes), tuple(prefills))

    def gather(self, pool: Tensor, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, head_dim] of the page pieces [2, n]. Valid until the next call."""
        pages = pool.view(-1, pool.shape[3] * self._kv_heads * self._head_dim)
        shape = (2, pieces.shape[1], pages.shape[1])
        if self._scratch.numel() < (needed := shape[0] * shape[1] * shape[2]):
            self._scratch = torch.empty(needed, dtype=self._dtype)
        key, value = self._scratch[:needed].view(shape)
        torch.index_select(pages, 0, pieces[0], out=key)
        torch.index_select(pages, 0, pieces[1], out=value)
        each = (-1, self._kv_heads, self._head_dim)
        return key.view(each), value.view(each)

    def _span(self, query: int, context: int, page_size: int) -> tuple[int, int]:
        """First page that the row's first token can see, and how many from there."""
        first = 0 if self._window is None else max(0, context - query + 1 - self._window) // page_size
        return first, -(-context // page_size) - first

    def _decode_mask(self, bounds: Sequence[tuple[int, int]], length: int) -> Tensor | None:
        starts, ends = torch.tensor(bounds).unsqueeze(-1).unbind(1)
        places = starts + torch.arange(length)
        visible = places < ends
        if self._window is not None:
            visible &= places >= ends - self._window
        return None if bool(visible.all()) else self._additive(visible)[:, None, None]

    def _prefill_mask(self, query: int, context: int, start: int) -> Tensor | None:
        if query == context and (self._window is None or context <= self._window):
            return None
        keys = torch.arange(start, context)
        own = torch.arange(context - query, context)[:, None]
        visible = keys <= own
        if self._window is not None:
            visible &= keys > own - self._window
        return self._additive(visible)[None, None]

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, float("-inf"))


class CpuPlan:
    """One forward pass; see `AttentionPlan`."""

    def __init__(
        self,
        owner: CpuAttention,
        pool: Tensor,
        slots: Tensor,
        decodes: tuple[_Decode, ...],
        prefills: tuple[_Prefill, ...],
    ) -> None:
        self._owner, self._pool, self._slots = owner, pool, slots
        self._decodes, self._prefills = decodes, prefills
        self._places = pool.view(-1, *pool.shape[4:])

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        # a group's padding reads other sequences' places with weight 0, and 0 times NaN would be NaN
        finite = key_value.nan_to_num()
        self._places.index_copy_(0, self._slots[layer], finite.transpose(0, 1).flatten(0, 1))
        if len(self._decodes) == 1 and self._decodes[0].tokens is None:
            return self._decode(self._decodes[0], layer, query)
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype)
        for group in self._decodes:
            assert group.tokens is not None
            out.index_copy_(0, group.tokens, self._decode(group, layer, query.index_select(0, group.tokens)))
        for row in self._prefills:
            out[row.lo : row.hi] = self._prefill(row, layer, query[row.lo : row.hi], key_value[row.lo : row.hi])
        return out

    def _decode(self, group: _Decode, layer: int, query: Tensor) -> Tensor:
        key, value = self._owner.gather(self._pool, group.pieces[layer])
        rows, (_, heads, dim) = group.num_rows, key.shape
        grouped = query.reshape(rows, heads, -1, dim)  # the query heads of one kv head stand as its queries
        key, value = (side.view(rows, -1, heads, dim).transpose(1, 2) for side in (key, value))
        return scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask).reshape(rows, -1)

    def _prefill(self, row: _Prefill, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        if row.pieces is None:
            key, value = key_value.unbind(1)
        else:
            key, value = (side[: row.context] for side in self._owner.gather(self._pool, row.pieces[layer]))
        tokens, heads, dim = len(query), key.shape[1], key.shape[2]
        grouped = query.reshape(tokens, heads, -1, dim).permute(1, 2, 0, 3)
        key, value = (
            side.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)  # stride 0: nothing is repeated
            for side in (key, value)
        )
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=row.mask, is_causal=row.mask is None)
        return out.permute(2, 0, 1, 3).reshape(tokens, -1)


def _lengths(batch: ForwardBatch) -> list[tuple[int, int]]:
    return list(zip(batch.query_lens, batch.context_lens, strict=True))


def _padded(pages: Tensor, first: int, count: int) -> Tensor:
    """`count` pages from place `first` on; page 0 stands where the row has no more."""
    chosen = pages[first : first + count]
    return torch.nn.functional.pad(chosen, (0, count - len(chosen)))
