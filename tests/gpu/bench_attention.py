"""Decode attention over the strided views of a pool: layouts, page sizes and kernels, against the bytes that it reads.

python tests/gpu/bench_attention.py [--rows 64] [--context 1500] [--layers 16] [--xqa]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

HEADS, KV_HEADS, DIM = 32, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--xqa", action="store_true", help="takes a minute to compile")
    options = parser.parse_args()
    for page_size in (16, 32, 64):
        for layout in ("NHD", "HND"):
            run_one(options, page_size, layout)


def run_one(options: argparse.Namespace, page_size: int, layout: str) -> None:
    rows, context, layers = options.rows, options.context, options.layers
    each = -(-context // page_size)
    inner = (page_size, KV_HEADS, DIM) if layout == "NHD" else (KV_HEADS, page_size, DIM)
    pool = torch.randn((rows * each, layers, 2, *inner), dtype=torch.bfloat16, device="cuda")
    query = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    pages = torch.randperm(rows * each, device="cuda").int()
    num_bytes = rows * context * KV_HEADS * DIM * 2 * 2 * layers
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.arange(rows + 1, dtype=torch.int32) * each
    last = torch.full((rows,), (context - 1) % page_size + 1, dtype=torch.int32)
    outputs = []
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        layout,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=pages.clone(),
        paged_kv_last_page_len_buffer=last.cuda(),
    )
    kind = torch.bfloat16
    wrapper.plan(indptr, pages, last, HEADS, KV_HEADS, DIM, page_size, q_data_type=kind, kv_data_type=kind)

    def flash() -> None:
        for layer in range(layers):
            outputs.append(wrapper.run(query, (pool[:, layer, 0], pool[:, layer, 1])))

    show(f"{layout} page {page_size} fa2", flash, num_bytes)
    if not options.xqa or page_size == 64:
        return
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    expected = outputs[-1].clone()
    table = pages.view(rows, each)
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda").view(torch.uint32)
    zeroed = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")

    def xqa() -> None:
        for layer in range(layers):
            view = (pool[:, layer, 0], pool[:, layer, 1])
            outputs.append(
                xqa_batch_decode_with_kv_cache(
                    query, view, zeroed, table, lengths, context, DIM**-0.5, 1.0, kv_layout=layout
                )
            )

    try:
        show(f"{layout} page {page_size} xqa", xqa, num_bytes)
        print("   error against fa2:", float((outputs[-1] - expected).norm() / expected.norm()))
    except Exception as error:  # what it does not take is part of the answer
        print(f"{layout} page {page_size} xqa: {str(error)[:300]}")


def show(name: str, work: Callable[[], None], num_bytes: int) -> None:
    """Of a graph of all layers, median of 20."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(23):
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            graph.replay()
            done.record(stream)
            stream.synchronize()
            times.append(begun.elapsed_time(done))
    took = sorted(times[3:])[10]
    print(f"{name}: {took:.3f} ms, {num_bytes / took / 1e9:.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
