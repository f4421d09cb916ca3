"""From the end of the last prefill chunk to the first decode step, on the GPUs that are there; and how much of the KV's
time on its way lies under computation. Mistral-7B's shape.

    python tests/gpu/bench_handover.py [--prefill-gpus 0,1] [--decode-gpus 0,1] [--lengths 1000,8000] [--count 20]

Alone: one request after another, from the stages' own spans. Under load: the client's time from a request's first
token, which comes from the last prefill stage, to its second, beside that of a step of the decode pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # the load's processes are started while a channel is open

import numpy as np

from stagemesh.shared.bench.drive import measure
from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.workload import Workload
from stagemesh.shared.rpc.client import Client
from tests.gpu.models import mistral_dir, write_tokenizer
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh, running_mesh

VOCAB = 32768
Span = dict[str, Any]


def percentiles(values: Iterable[float]) -> str:
    seen = sorted(values)
    if not seen:
        return "none"
    return f"p50 {np.percentile(seen, 50):.2f} ms, p99 {np.percentile(seen, 99):.2f} ms, of {len(seen)}"


def handovers(forwards: list[Span], last: int) -> list[float]:
    """Milliseconds from each last chunk to the decode step that follows it."""
    waits, end_ns = [], None
    for span in sorted(forwards, key=lambda span: int(span["start_ns"])):
        if span["process"] == f"prefill-0/{last}":
            end_ns = span["end_ns"]
        elif span["process"] == "decode-0/0" and end_ns is not None:
            waits.append((span["start_ns"] - end_ns) / 1e6)
            end_ns = None
    return waits


def hidden(write: Span, forwards: list[Span]) -> float:
    """The share of a write that lies under prefill's computation."""
    start, end = write["start_ns"], write["end_ns"]
    covered = at = start
    total = 0
    for span in sorted(forwards, key=lambda span: int(span["start_ns"])):
        begun, done = max(at, span["start_ns"]), min(end, span["end_ns"])
        if done > begun:
            total, at = total + done - begun, done
    return total / max(1, end - covered)


async def ask(mesh: RunningMesh, length: int, count: int, new_tokens: int) -> list[float]:
    """Milliseconds from the first token to the second of `count` requests, one after the other."""
    rng, gaps = np.random.default_rng(length), []
    async with Client(mesh.router, GENERATOR) as client:
        for _ in range(count):
            at_s: list[float] = []

            def note(answer: Answer, at_s: list[float] = at_s) -> bool:
                at_s += [time.monotonic()] * (len(answer.token_ids) - len(at_s))
                return True

            request = token_request(rng.integers(3, VOCAB, length).tolist(), new_tokens, ignore_eos=True)
            await generate(client, request, on_response=note, timeout_s=60)
            gaps.append((at_s[1] - at_s[0]) * 1e3)
    return gaps


async def alone(mesh: RunningMesh, length: int, options: argparse.Namespace) -> None:
    start_ns = time.monotonic_ns()
    await ask(mesh, length, options.count, 3)
    spans = [span for span in await mesh.spans() if span["start_ns"] > start_ns]
    forwards = [span for span in spans if span["name"] == "forward"]
    chunks = [span for span in forwards if span["process"].startswith("prefill")]
    writes = [span for span in spans if span["name"] == "kv_write"]
    took_s = sum(write["end_ns"] - write["start_ns"] for write in writes) / 1e9
    size = sum(write["bytes"] for write in writes)
    under = float(np.mean([hidden(write, chunks) for write in writes]))
    last = len(options.prefill_gpus.split(",")) - 1
    chunk_ms = 1e-6 * float(np.mean([chunk["end_ns"] - chunk["start_ns"] for chunk in chunks]))
    print(
        f"{length} tokens: {percentiles(handovers(forwards, last))}; {len(writes)} writes of "
        f"{size / len(writes) / 1e6:.1f} MB, {1e3 * took_s / len(writes):.2f} ms each, {size / took_s / 1e9:.0f} GB/s, "
        f"{100 * under:.0f}% of it hidden; chunks of {chunk_ms:.1f} ms",
        flush=True,
    )


async def under_load(mesh: RunningMesh, length: int, options: argparse.Namespace) -> None:
    load = Load(mesh.router, Workload(options.running, 200, 1200, VOCAB, seed=1), 1, None, 300.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(measure(load))
        await asyncio.sleep(3.0)  # all of them decode by then
        gaps = await ask(mesh, length, options.count, 12)
    steps = [gap * 1e3 for record in running.result().records for gap in record.itl_s]
    print(
        f"{length} tokens beside {options.running} that decode: first to second token {percentiles(gaps)}; "
        f"a token of the others {percentiles(steps)}",
        flush=True,
    )


async def measure_all(mesh: RunningMesh, options: argparse.Namespace) -> None:
    lengths = [int(length) for length in options.lengths.split(",")]
    for length in lengths:
        await ask(mesh, length, 2, 3)  # warms up
    for length in lengths:
        await alone(mesh, length, options)
    for length in lengths:
        await under_load(mesh, length, options)
    await mesh.check_idle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-gpus", default="0,1")
    parser.add_argument("--decode-gpus", default="0,1")
    parser.add_argument("--lengths", default="1000,8000")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--running", type=int, default=64)
    options = parser.parse_args()
    layout = [
        f"--{role}-pp={len(g.split(','))}"
        for role, g in (("prefill", options.prefill_gpus), ("decode", options.decode_gpus))
    ]
    layout += [f"--prefill-gpus={options.prefill_gpus}", f"--decode-gpus={options.decode_gpus}"]
    with tempfile.TemporaryDirectory() as folder:
        path = mistral_dir(Path(folder) / "model")
        write_tokenizer(path)
        with running_mesh(Path(folder), "--device=cuda", f"--model=dummy:{path}", *layout, "--max-running=128") as mesh:
            try:
                asyncio.run(measure_all(mesh, options))
            except BaseException:
                print(mesh.said, flush=True)
                raise


if __name__ == "__main__":
    main()
