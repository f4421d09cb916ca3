"""Triton kernels for what no library does in one pass: rotation with the write into the paged pool, and the embedding
of ids that may still be on their way from the last stage."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEADS_A_PROGRAM: Final = 8


@triton.jit
def _rope_append(
    qkv,
    cos,
    sin,
    positions,
    slots,
    query,
    pool,
    page_stride,
    side_stride,
    PAGE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:  # the kernel before may still run, the one after may start
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)[None, :]
    there = heads < QUERY_HEADS + 2 * KV_HEADS
    source = qkv + token * (QUERY_HEADS + 2 * KV_HEADS) * 2 * HALF + heads[:, None] * 2 * HALF + dims
    low = tl.load(source, mask=there[:, None], other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=there[:, None], other=0.0).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cos + position * HALF + dims)
    sine = tl.load(sin + position * HALF + dims)
    turned = (heads < QUERY_HEADS + KV_HEADS)[:, None]
    new_low = tl.where(turned, low * cosine - high * sine, low)
    new_high = tl.where(turned, high * cosine + low * sine, high)
    is_query = (heads < QUERY_HEADS)[:, None]
    target = query + token * QUERY_HEADS * 2 * HALF + heads[:, None] * 2 * HALF + dims
    tl.store(target, new_low.to(query.dtype.element_ty), mask=is_query)
    tl.store(target + HALF, new_high.to(query.dtype.element_ty), mask=is_query)
    slot = tl.load(slots + token).to(tl.int64)
    is_value = heads >= QUERY_HEADS + KV_HEADS
    kv_head = heads - QUERY_HEADS - tl.where(is_value, KV_HEADS, 0)
    place = (slot // PAGE) * page_stride + tl.where(is_value, side_stride, 0)
    place += ((slot % PAGE) * KV_HEADS + kv_head) * 2 * HALF
    kept = (there & (heads >= QUERY_HEADS) & (slot >= 0))[:, None]
    tl.store(pool + place[:, None] + dims, new_low.to(pool.dtype.element_ty), mask=kept)
    tl.store(pool + place[:, None] + dims + HALF, new_high.to(pool.dtype.element_ty), mask=kept)


@triton.jit
def _embed(sources, literals, sampled, table, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row)
    pointed = tl.load(sampled + source, mask=source >= 0, other=0)
    token_id = tl.where(source >= 0, pointed, tl.load(literals + row).to(tl.int64))
    values = tl.load(table + token_id * HIDDEN + dims, mask=dims < HIDDEN)
    tl.store(out + row * HIDDEN + dims, values, mask=dims < HIDDEN)


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer_pool: Tensor,
    num_heads: int,
    *,
    chained: bool = False,
) -> Tensor:
    """Rotates queries and keys of `qkv` [T, (heads + 2 kv_heads) * head_dim], writes keys and values to `slots` of
    `layer_pool`, a strided view [num_pages, 2, page_size, kv_heads, head_dim], and returns the queries
    [T, heads, head_dim]. `cos` and `sin`: float32 [max_context, head_dim / 2]. `positions`, `slots`: int32 or int64
    [T]; nothing is written for a negative slot. chained: launched while the kernel before it ends; on Hopper."""
    page_size, kv_heads, head_dim = layer_pool.shape[2:]
    query = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    grid = (len(qkv), triton.cdiv(num_heads + 2 * kv_heads, HEADS_A_PROGRAM))
    kernel: Any = _rope_append
    kernel[grid](
        qkv,
        cos,
        sin,
        positions,
        slots,
        query,
        layer_pool,
        layer_pool.stride(0),
        layer_pool.stride(1),
        PAGE=page_size,
        QUERY_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HEADS=HEADS_A_PROGRAM,
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )
    return query


def embed(sources: Tensor, literals: Tensor, sampled: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """Writes to `out` [B, hidden], and returns, rows of `table` [vocab, hidden] for B ids: `sampled[sources[b]]` where
    that is 0 or more, else `literals[b]`. `sampled`: int64, flat; `sources`, `literals`: int32 [B]."""
    rows, hidden = len(sources), table.shape[1]
    assert out.shape == (rows, hidden), out.shape
    assert out.is_contiguous(), out.stride()
    block = min(1024, triton.next_power_of_2(hidden))
    kernel: Any = _embed
    kernel[(rows, triton.cdiv(hidden, block))](sources, literals, sampled, table, out, HIDDEN=hidden, BLOCK=block)
    return out
