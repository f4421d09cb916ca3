"""How long a decode step and a prefill chunk of one stage take, against the bytes and flops that they must move.

python tests/gpu/bench_step.py [--layers 16] [--rows 64] [--context 1500] [--profile] [--plain]

`--plain`: the matrices of decode by cuBLAS.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from stagemesh.shared.core.commands import SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.model.layers import allocate_pool
from stagemesh.shared.model.source import open_model
from tests.gpu.models import PAGE, cuda_stage, mistral_dir

COPY_BYTES_PER_S, FLOPS = 4.3e12, 790e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = open_model(f"dummy:{mistral_dir(Path(folder), num_hidden_layers=options.layers)}")
    config, layers = source.config, LayerRange(0, options.layers)
    each = -(-options.context // PAGE) + 1
    num_pages = options.rows * each + options.chunk // PAGE + 16
    pool = allocate_pool(config, len(layers), num_pages, PAGE, torch.bfloat16, "cuda").normal_()
    decode, _, stream = cuda_stage(
        source,
        "decode",
        num_pages=num_pages,
        max_rows=options.rows,
        weights_on="cuda",
        pool=pool,
        packed=not options.plain,
    )
    rng = np.random.default_rng(0)
    pages = rng.permutation(num_pages - options.chunk // PAGE - 16)
    deltas = {h: pages[(h - 1) * each : h * each].tolist() for h in range(1, options.rows + 1)}
    joins = tuple(Join(h, RequestRef(str(h), 1), SamplingParams(100), None, 1) for h in deltas)
    decode.apply(Command(0, joins=joins, page_deltas=pack_deltas(deltas)))
    rows = np.array([(h, options.context - 1, 1, 0, 0, SAMPLE) for h in deltas], dtype=np.int64)
    tokens = rng.integers(3, 1000, options.rows)

    def step(number: int) -> None:
        decode.prepare(Step(number, 0, rows, tokens))(None)

    kv = 2 * config.num_kv_heads * config.head_dim * 2 * options.rows * options.context * options.layers
    weights = source.weight_bytes(layers, torch.bfloat16, first=False, last=True)
    took = timed(stream, step, 60)
    print(
        f"decode, {options.layers} layers + head, {options.rows} rows, context {options.context}: {took * 1e3:.3f} ms, "
        f"floor {1e3 * (kv + weights) / COPY_BYTES_PER_S:.3f} ms ({(kv + weights) / took / 1e12:.2f} TB/s)"
    )
    if options.profile:
        table(stream, step)
    prefill, _, stream_2 = cuda_stage(source, "prefill", num_pages=num_pages, weights_on="cuda", pool=pool)
    count, length = options.chunk // 1024, 1024
    own = range(num_pages - options.chunk // PAGE - 16, num_pages)
    deltas = {h: list(own)[(h - 1) * length // PAGE : h * length // PAGE] for h in range(1, count + 1)}
    joins = tuple(Join(h, RequestRef(str(h), 1), SamplingParams(100), None, length) for h in deltas)
    prefill.apply(Command(0, joins=joins, page_deltas=pack_deltas(deltas)))
    chunk_rows = np.array([(h, 0, length, 0, 0, SAMPLE) for h in deltas], dtype=np.int64)
    ids = rng.integers(3, 1000, options.chunk)

    def chunk(number: int) -> None:
        prefill.prepare(Step(number, 0, chunk_rows, ids))(None)

    flops = 2 * options.chunk * (weights / 2 - config.vocab_size * config.hidden_size)
    flops += 2 * 2 * options.chunk * length / 2 * config.num_heads * config.head_dim * options.layers
    took = timed(stream_2, chunk, 8)
    print(
        f"prefill, {options.layers} layers, {count} x {length} tokens: {took * 1e3:.1f} ms, floor "
        f"{1e3 * flops / FLOPS:.1f} ms ({flops / took / 1e12:.0f} TFLOP/s)"
    )
    if options.profile:
        table(stream_2, chunk)


def timed(stream: torch.cuda.Stream, work, count: int) -> float:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Seconds of one, many in a row."""
    with torch.cuda.stream(stream):
        for number in range(1, 6):
            work(number)
        stream.synchronize()
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(stream)
        for number in range(6, 6 + count):
            work(number)
        done.record(stream)
        stream.synchronize()
    return begun.elapsed_time(done) / 1e3 / count


def table(stream: torch.cuda.Stream, work) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Kernels of five steps, longest first: microseconds a step, and how many."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen, torch.cuda.stream(stream):
        for number in range(1, 6):
            work(number)
        stream.synchronize()
    total = 0.0
    for event in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:14]:
        each = event.self_device_time_total / 5
        total += each
        print(f"  {each:9.1f} us  {event.count / 5:6.1f} x  {event.key[:100]}")


if __name__ == "__main__":
    main()
