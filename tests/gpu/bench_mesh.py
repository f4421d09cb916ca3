"""A mesh on the GPUs that are there, under load: Mistral-7B's shape, random weights, bfloat16.

    python tests/gpu/bench_mesh.py [--prefill-gpus 0,1] [--decode-gpus 0,1] [--loads 128x1000x1000,1x1000x200]
        [--range-ratio 0.9] [--layers 32] [--rounds 2] [--trace DIR] [KEY=VALUE ...]

Every KEY=VALUE is a setting of the deployment, such as ENGINE__RUN_AHEAD=0. In the middle of a round, what the decode
stages have done is read twice: the share of the device's time in steps, and the host's time to enqueue one.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from stagemesh.shared.bench.drive import measure
from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.stats import summarize
from stagemesh.shared.bench.workload import Workload
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT
from tests.gpu.models import mistral_dir, write_tokenizer
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import Scrape, fetch

VOCAB = 32768
TRACED_S = (0.01, 0.3)  # the first recording loads the profiler, at another time on each stage
TRACE_AT_S = 0.003  # after the start, for each token of an answer
SAMPLE_AT = (0.45, 0.75)  # of the time that a round takes


async def sampled(mesh: RunningMesh, after_s: list[float]) -> list[dict[str, dict[str, int]]]:
    """The gauges of every process at those times."""
    start_s, seen = time.monotonic(), []
    for at_s in after_s:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        replies = await mesh.check()
        seen.append({name: dict(reply.gauges) for name, reply in replies.items()})
    return seen


async def recorded(mesh: RunningMesh, at_s: float, folder: Path) -> None:
    """A trace of every decode stage, from `at_s` on, in `folder`."""
    await asyncio.sleep(at_s)
    stages = {name: address for name, address in (await mesh.peers()).items() if name.startswith("decode")}

    async def one(name: str, address: str, seconds: float) -> None:
        async with Client(address, INSPECT) as client:
            request = inspect_pb2.ProfileRequest(seconds=seconds)
            reply = await client.call("Profile", request, timeout_s=60)
        shutil.copy(reply.path, folder / f"{name.replace('/', '-')}.json")

    for seconds in TRACED_S:
        async with asyncio.TaskGroup() as group:
            for name, address in stages.items():
                group.create_task(one(name, address, seconds))


async def one_round(mesh: RunningMesh, load: Load, after_s: list[float]) -> tuple[Any, Any]:
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(sampled(mesh, after_s))
        measuring = group.create_task(measure(load))
    return measuring.result(), sampling.result()


def print_stages(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> None:
    for name, gauges in after.items():
        if "gpu_busy_us" not in gauges or not (steps := gauges["steps_done"] - before[name]["steps_done"]):
            continue
        busy, idle, launch = (gauges[k] - before[name][k] for k in ("gpu_busy_us", "gpu_idle_us", "launch_us"))
        print(
            f"  {name}: {steps} steps, {busy / steps / 1e3:.3f} ms each, idle between {idle / steps / 1e3:.3f} ms, "
            f"in steps {100 * busy / (busy + idle):.1f}% of the time, enqueued in {launch / steps / 1e3:.2f} ms"
        )


Lags = dict[str, dict[float, float]]


def read_lags(mesh: RunningMesh) -> Lags:
    """Of every process: by a bound in seconds, how often its event loop was that late at most, since its start."""
    said = {}
    for process in mesh.read_record()["processes"]:
        if process["metrics"]:
            buckets = Scrape(fetch(process["metrics"])).of("loop_lag_seconds_bucket", "le")
            said[process["name"]] = {float(le): count for le, count in buckets.items()}
    return said


def p99_ms(before: Lags, after: Lags) -> dict[str, float]:
    """The bound that 99 of 100 samples between the two keep."""
    found = {}
    for name, buckets in after.items():
        counts = {le: count - before[name][le] for le, count in buckets.items()}
        found[name] = 1e3 * min(le for le, count in counts.items() if count >= 0.99 * counts[float("inf")])
    return found


async def measure_load(mesh: RunningMesh, text: str, options: argparse.Namespace, seeds: Iterator[int]) -> None:
    """Prompts of their own in every round, of which nothing is remembered."""
    num_prompts, input_len, output_len = (int(part) for part in text.split("x"))
    took_s = 0.0
    for _ in range(options.rounds):
        work = Workload(num_prompts, input_len, output_len, VOCAB, options.range_ratio, seed=next(seeds))
        load = Load(mesh.router, work, min(options.clients, num_prompts), None, 300.0)
        guess_s = took_s or output_len * 0.009
        measurement, seen = await one_round(mesh, load, [guess_s * at for at in SAMPLE_AT])
        summary = summarize(measurement.records)
        took_s = summary.duration_s
        print(
            f"{text}: {summary.throughput['output_tokens_per_s']:.0f} output tok/s, {took_s:.2f} s, TTFT "
            f"{summary.ttft.mean:.3f} s, TPOT {summary.tpot.mean * 1e3:.2f} ms, ITL P99 "
            f"{summary.itl.p99 * 1e3:.1f} ms, "
            f"{summary.failed} failed {summary.failures[:3]}, client lag {measurement.max_lag_s * 1e3:.0f} ms",
            flush=True,
        )
        print_stages(*seen)
        if options.spans:
            print_spans(await mesh.spans())


def print_spans(spans: list[dict[str, Any]]) -> None:
    """The chunks of the last round, and when decode began."""
    forward = sorted((s for s in spans if s["name"] == "forward"), key=lambda s: s["start_ns"])
    start_ns = max((s["start_ns"] for s in forward if s["tokens"] > 900 and "prefill" in s["process"]), default=0) - 4e9
    for span in forward:
        if span["start_ns"] > start_ns and "prefill" in span["process"]:
            at_ms, took_ms = (span["start_ns"] - start_ns) / 1e6, (span["end_ns"] - span["start_ns"]) / 1e6
            print(
                f"  {span['process']} at {at_ms:.0f} ms: {span['tokens']} tokens, {took_ms:.1f} ms, "
                f"enqueued in {span['launch_ns'] / 1e6:.1f} ms"
            )
    decode = [s for s in forward if s["start_ns"] > start_ns and s["process"] == "decode-0/0"]
    writes = [s for s in spans if s["name"] == "kv_write" and s["start_ns"] > start_ns]
    if writes:
        took = sum(s["end_ns"] - s["start_ns"] for s in writes) / 1e9
        print(
            f"  {len(writes)} KV writes, {sum(s['bytes'] for s in writes) / 1e9:.1f} GB in {took:.2f} s, added up; the "
            f"last ended at {(max(s['end_ns'] for s in writes) - start_ns) / 1e6:.0f} ms"
        )
    print("  decode from", [(round((s["start_ns"] - start_ns) / 1e6), s["rows"]) for s in decode[:8]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-gpus", default="0,1")
    parser.add_argument("--decode-gpus", default="0,1")
    parser.add_argument("--loads", default="128x1000x1000", help="requests x input x output, with commas between them")
    parser.add_argument("--range-ratio", type=float, default=0.9)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="a folder for a trace of each decode stage, under the first load")
    parser.add_argument("--spans", action="store_true")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    environ = {f"STAGEMESH_{k}": v for k, _, v in (pair.partition("=") for pair in options.settings)}
    prefill, decode = options.prefill_gpus.split(","), options.decode_gpus.split(",")
    with tempfile.TemporaryDirectory() as folder:
        path = mistral_dir(Path(folder) / "model", num_hidden_layers=options.layers)
        write_tokenizer(path)
        layout = [f"--prefill-pp={len(prefill)}", f"--decode-pp={len(decode)}"]
        layout += [f"--prefill-gpus={options.prefill_gpus}", f"--decode-gpus={options.decode_gpus}"]
        flags = ["--device=cuda", f"--model=dummy:{path}", *layout, f"--max-running={options.max_running}"]
        start_s = time.monotonic()
        with running_mesh(Path(folder), *flags, environ=environ) as mesh:
            print(f"ready after {time.monotonic() - start_s:.1f} s", flush=True)
            try:
                asyncio.run(measure_all(mesh, options))
            except BaseException:
                print(mesh.said, flush=True)
                raise


async def measure_all(mesh: RunningMesh, options: argparse.Namespace) -> None:
    await measure(Load(mesh.router, Workload(8, 200, 20, VOCAB), 1, None, 120.0))  # warms up
    before = await asyncio.to_thread(read_lags, mesh)
    seeds = count(1)  # 0 is what has warmed it up
    for text in options.loads.split(","):
        await measure_load(mesh, text, options, seeds)
    print("loop lag, p99 in ms, at most:", p99_ms(before, await asyncio.to_thread(read_lags, mesh)), flush=True)
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
        num_prompts, input_len, output_len = (int(part) for part in options.loads.split(",")[0].split("x"))
        work = Workload(num_prompts, input_len, output_len, VOCAB, options.range_ratio, seed=next(seeds))
        async with asyncio.TaskGroup() as group:
            group.create_task(recorded(mesh, output_len * TRACE_AT_S, options.trace))
            await measure(Load(mesh.router, work, min(options.clients, num_prompts), None, 300.0))
    await mesh.check_idle()


if __name__ == "__main__":
    main()
