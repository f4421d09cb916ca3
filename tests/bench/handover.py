"""From the end of a prompt's last prefill chunk to its first decode step, part by part; and how much of the KV's time
on its way lies under computation.

    python tests/bench/handover.py                # on the CPU, a tiny model: only a comparison in one sitting tells
    python tests/bench/handover.py --device cuda [--prefill-gpus 0,1] [--decode-gpus 0,1]    # Mistral-7B's shape
        [KEY=VALUE ...]    # settings of the deployment, such as ENGINE__LATE_ISSUE=true

Alone: one request after another. Under load: the same beside requests that decode, where a cycle of the pipeline and 3
ms are allowed. All from the stages' own spans, on the host's one clock.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stagemesh.shared.bench.drive import measure
from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.workload import Workload
from stagemesh.shared.rpc.client import Client
from tests.support.bench_layout import VOCAB, add_layout, layout, prefill_stages, settings_of
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.handover import Handover, Span, cycles_ms, handovers, hidden_share
from tests.support.running import RunningMesh, running_mesh

MARGIN_MS = 3.0
PROMPT_TOKENS, NEW_TOKENS = 200, {"cpu": 800, "cuda": 1200}  # of those that decode
DECODE_FIRST = "decode-0/0"


def percentiles(values: Iterable[float], high: int = 90) -> str:
    seen = sorted(values)
    if not seen:
        return "none"
    return f"p50 {np.percentile(seen, 50):.2f}, p{high} {np.percentile(seen, high):.2f} ms"


def say(what: str, found: list[Handover], cycle_ms: float | None = None) -> None:
    allowed = "" if cycle_ms is None else f"; a cycle is {cycle_ms:.2f} ms, allowed are {cycle_ms + MARGIN_MS:.2f}"
    print(f"{what}: {percentiles(h.wait_ms for h in found)}, of {len(found)}{allowed}", flush=True)
    for name in found[0].parts_ms if found else ():
        print(f"    {name:>18}: {percentiles(h.parts_ms[name] for h in found)}")
    print(
        f"    {'first token there':>18}: {percentiles((h.first_token_ns - h.chunk_ns) / 1e6 for h in found)}",
        flush=True,
    )


async def ask(mesh: RunningMesh, length: int, options: argparse.Namespace, new_tokens: int) -> list[float]:
    """Milliseconds from the first token to the second of some requests, one after the other."""
    rng, gaps = np.random.default_rng(length), []
    async with Client(mesh.router, GENERATOR) as client:
        for _ in range(options.count):
            at_s: list[float] = []

            def note(answer: Answer, at_s: list[float] = at_s) -> bool:
                at_s += [time.monotonic()] * (len(answer.token_ids) - len(at_s))
                return True

            request = token_request(rng.integers(3, options.vocab, length).tolist(), new_tokens, ignore_eos=True)
            await generate(client, request, on_response=note, timeout_s=60)
            gaps.append((at_s[1] - at_s[0]) * 1e3)
    return gaps


def say_writes(spans: list[Span]) -> None:
    chunks = [s for s in spans if s["name"] == "forward" and s["process"].startswith("prefill")]
    writes = [s for s in spans if s["name"] == "kv_write"]
    took_s = sum(write["end_ns"] - write["start_ns"] for write in writes) / 1e9
    size = sum(write["bytes"] for write in writes)
    under = float(np.mean([hidden_share(write, chunks) for write in writes]))
    chunk_ms = 1e-6 * float(np.mean([chunk["end_ns"] - chunk["start_ns"] for chunk in chunks]))
    print(
        f"    {len(writes)} writes of {size / len(writes) / 1e6:.1f} MB, {1e3 * took_s / len(writes):.2f} ms each, "
        f"{size / took_s / 1e9:.1f} GB/s, {100 * under:.0f}% of it hidden; chunks of {chunk_ms:.1f} ms",
        flush=True,
    )


async def alone(mesh: RunningMesh, length: int, options: argparse.Namespace) -> None:
    start_ns = time.monotonic_ns()
    await ask(mesh, length, options, 3)
    spans = [span for span in await mesh.spans() if span["start_ns"] > start_ns]
    say(f"{length} tokens", handovers(spans, options.prefill_last, DECODE_FIRST))
    say_writes(spans)


async def under_load(mesh: RunningMesh, length: int, options: argparse.Namespace) -> None:
    workload = Workload(options.running, PROMPT_TOKENS, NEW_TOKENS[options.device], options.vocab, seed=1)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(measure(Load(mesh.router, workload, 1, None, 300.0)))
        await asyncio.sleep(3.0)  # all of them decode by then
        start_ns = time.monotonic_ns()
        gaps = await ask(mesh, length, options, 12)
        end_ns, is_loaded = time.monotonic_ns(), not running.done()
    assert is_loaded, "the load was over before the last request: ask for fewer"
    spans = [span for span in await mesh.spans() if start_ns < span["start_ns"] < end_ns]
    found = handovers(spans, options.prefill_last, DECODE_FIRST)
    cycle_ms = float(np.median(cycles_ms(spans, DECODE_FIRST)))
    say(f"{length} tokens beside {options.running} that decode", found, cycle_ms)
    steps = [gap * 1e3 for record in running.result().records for gap in record.itl_s]
    print(
        f"    client: first to second token {percentiles(gaps)}; a token of the others {percentiles(steps, 99)}",
        flush=True,
    )


async def measure_all(mesh: RunningMesh, options: argparse.Namespace) -> None:
    for length in options.lengths:
        await ask(mesh, length, argparse.Namespace(**{**vars(options), "count": 2}), 3)  # warms up
    for _ in range(options.rounds):
        for length in options.lengths:
            await alone(mesh, length, options)
        for length in options.lengths:
            await under_load(mesh, length, options)
    await mesh.check_idle()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_layout(parser)
    parser.add_argument("--lengths", help="of the prompts, in tokens (1000,8000; on the CPU 500)")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--running", type=int, help="requests that decode meanwhile (64; on the CPU 16)")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.lengths = [int(length) for length in (options.lengths or ("500" if on_cpu else "1000,8000")).split(",")]
    options.running = options.running or (16 if on_cpu else 64)
    options.vocab = VOCAB[options.device]
    options.prefill_last = f"prefill-0/{prefill_stages(options) - 1}"
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        ups = layout(options, Path(folder))
        with running_mesh(Path(folder), *ups, "--max-running=128", environ=settings_of(options)) as mesh:
            try:
                asyncio.run(measure_all(mesh, options))
            except BaseException:
                print(mesh.said, flush=True)
                raise


if __name__ == "__main__":
    main()
