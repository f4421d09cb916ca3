"""Long answers on a pool that holds a part of them: what finishes, how fast, and how long retracted sequences wait.

    python tests/bench/retraction.py                # on the CPU, a tiny model, small lengths
    python tests/bench/retraction.py --device cuda [--prefill-gpus 0,1] [--decode-gpus 2,3] [--prompts 256]
        [--input-len 1000] [--output-len 2000] [--share 0.17] [--conservativeness 0.1,1.0] [KEY=VALUE ...]
    ... --seconds 300 --input-len 8000 --output-len 16000 --conservativeness 0.1 --no-fitting    # the first part of it

All prompts at once, lengths uniform in [0.9, 1] of the given ones. First with a pool that holds all of them to their
ends (unless --no-fitting), then with `--share` of it. Every ten seconds what decode has done since is said. Exits with
1 if a request does not bring all its tokens; `--seconds` after the first token, if a request has failed, or if nothing
was decoded in the last interval.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from stagemesh.shared.bench.drive import measure
from stagemesh.shared.bench.frames import Load, Progress
from stagemesh.shared.bench.stats import summarize
from stagemesh.shared.bench.workload import Workload, plan
from tests.support.bench_layout import VOCAB, add_layout, layout, settings_of
from tests.support.running import RunningMesh, running_mesh
from tests.support.scrape import Scrape, scrape_after

PAGE: Final = 16
EVERY_S: Final = 10.0
LIMIT_S: Final = 3600.0
SIZES: Final = {"cpu": (48, 100, 200), "cuda": (256, 1000, 2000)}  # prompts, tokens in, tokens out
COUNTED: Final = ("retractions", "resumed_sequences", "recomputed_sequences", "reservations_taken_back")


@dataclass(frozen=True, slots=True)
class Said:
    """What decode's head has counted until `at_s`, in seconds of its own clock, and what waits there then."""

    at_s: float
    tokens: float
    counted: tuple[float, ...]
    retracted_s: float
    retracted_under: dict[float, float]  # how many were it for so many seconds at most
    waiting: float
    longest_s: float

    @staticmethod
    def of(scrape: Scrape) -> Said:
        return Said(
            scrape.value("sampled_timestamp_seconds"),
            scrape.value("decoded_tokens_total"),
            tuple(scrape.value(f"{name}_total") for name in COUNTED),
            scrape.value("retracted_seconds_sum"),
            {float(le): count for le, count in scrape.of("retracted_seconds_bucket", "le").items()},
            scrape.value("waiting_sequences", reason="resume"),
            scrape.value("longest_wait_seconds", reason="resume"),
        )


@dataclass(slots=True)
class Run:
    """Of one pool. Rates are in tokens a second."""

    name: str
    num_pages: int
    finished: int = 0
    failed: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    stands_still: bool = False


class Watch:
    """Says every ten seconds what has been done since."""

    def __init__(self, mesh: RunningMesh) -> None:
        (self._address,) = [p["metrics"] for p in mesh.record["processes"] if p["name"] == "decode-0/0"]
        self.progress = Progress()
        self.interval_tokens = 0.0  # of the latest
        self._first_token = asyncio.Event()

    async def look(self) -> Said:
        return Said.of(await scrape_after(self._address, time.time()))

    async def say_all(self) -> None:
        before = first = await self.look()
        while True:
            await asyncio.sleep(EVERY_S)
            now = await self.look()
            retracted, resumed, *_ = (a - b for a, b in zip(now.counted, before.counted, strict=True))
            print(
                f"    {now.at_s - first.at_s:6.0f} s: {(now.tokens - before.tokens) / (now.at_s - before.at_s):7.0f} "
                f"tok/s, {self.progress.done} ended, {retracted:.0f} retracted and {resumed:.0f} resumed meanwhile, "
                f"{now.waiting:.0f} wait for that, the first of them for {now.longest_s:.1f} s",
                flush=True,
            )
            self.interval_tokens, before = now.tokens - before.tokens, now

    def follow(self, progress: Progress) -> None:
        self.progress = progress
        if progress.tokens:
            self._first_token.set()

    async def cut(self, limit: asyncio.Timeout, seconds: float | None) -> None:
        """Lets `limit` come `seconds` after the first token."""
        await self._first_token.wait()
        if seconds is not None:
            limit.reschedule(asyncio.get_running_loop().time() + seconds)


async def measure_run(mesh: RunningMesh, run: Run, workload: Workload, seconds: float | None) -> None:
    watch = Watch(mesh)
    start = await watch.look()
    saying, summary = asyncio.create_task(watch.say_all()), None
    try:
        async with asyncio.timeout(None) as limit:
            cutting = asyncio.create_task(watch.cut(limit, seconds))
            clients = min(4, workload.num_prompts)
            measured = await measure(Load(mesh.router, workload, clients, timeout_s=LIMIT_S), watch.follow)
            summary = summarize(measured.records)
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        end = await watch.look()
        saying.cancel()
        cutting.cancel()
    if summary is not None:
        run.finished, run.failed, run.seconds = summary.successful, summary.failed, summary.duration_s
        run.rate = summary.throughput["output_tokens_per_s"]
        for failure, count in summary.failures:
            print(f"    {count}: {failure}")
    else:
        run.finished, run.failed = watch.progress.done - watch.progress.failed, watch.progress.failed
        run.seconds = end.at_s - start.at_s
        run.rate = (end.tokens - start.tokens) / run.seconds
        run.stands_still = not (watch.interval_tokens if run.seconds > 2 * EVERY_S else run.rate)
    retracted, resumed, recomputed, back = (a - b for a, b in zip(end.counted, start.counted, strict=True))
    waited_s = (end.retracted_s - start.retracted_s) / resumed if resumed else 0.0
    under = {le: count - start.retracted_under[le] for le, count in end.retracted_under.items()}
    most_s = min((le for le, count in under.items() if count == under[inf]), default=inf) if resumed else 0.0
    print(
        f"  {run.name}, {run.num_pages} pages: {run.finished} of {workload.num_prompts} finished, {run.failed} failed, "
        f"in {run.seconds:.1f} s, {run.rate:.0f} tok/s; {retracted:.0f} retracted, {resumed:.0f} resumed after "
        f"{waited_s:.2f} s on average and {most_s:g} s at most, {recomputed:.0f} recomputed, "
        f"{back:.0f} reservations taken back",
        flush=True,
    )


def pages_of(workload: Workload) -> int:
    """What all requests have when they end."""
    return sum(-(-(len(each.token_ids) + each.output_tokens) // PAGE) for each in plan(workload))


def run_one(options: argparse.Namespace, run: Run, workload: Workload, conservativeness: float) -> None:
    environ = {**settings_of(options), "STAGEMESH_ENGINE__SCHEDULE_CONSERVATIVENESS": str(conservativeness)}
    environ.setdefault("STAGEMESH_ENGINE__HOST_KV_BYTES", str(options.host_gib << 30))
    sizes = [f"--page-size={PAGE}", f"--num-pages={run.num_pages}", f"--max-running={workload.num_prompts}"]
    with tempfile.TemporaryDirectory() as folder:
        ups = layout(options, Path(folder))
        with running_mesh(Path(folder), *ups, *sizes, environ=environ) as mesh:
            try:
                asyncio.run(measure_run(mesh, run, workload, options.seconds))
                asyncio.run(mesh.check_idle())
            except BaseException:
                print(mesh.said, flush=True)
                raise


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_layout(parser)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--input-len", type=int)
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--range-ratio", type=float, default=0.9)
    parser.add_argument("--share", type=float, default=0.17, help="of the pages that all requests end with")
    parser.add_argument("--conservativeness", default="0.1,1.0")
    parser.add_argument("--no-fitting", action="store_true", help="no run with a pool that holds all")
    parser.add_argument("--seconds", type=float, help="of each run")
    parser.add_argument("--host-gib", type=int, default=8, help="of a decode stage, for what is retracted")
    options = parser.parse_args()
    for name, size in zip(("prompts", "input_len", "output_len"), SIZES[options.device], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, size)
    return options


def main() -> None:
    options = parse()
    workload = Workload(
        options.prompts, options.input_len, options.output_len, VOCAB[options.device], range_ratio=options.range_ratio
    )
    need = pages_of(workload)
    print(
        f"{options.prompts} prompts at once, {options.input_len} in, {options.output_len} out, range ratio "
        f"{options.range_ratio}: {need} pages at their ends",
        flush=True,
    )
    runs = [] if options.no_fitting else [(Run("all fit", need), 1.0)]
    for text in options.conservativeness.split(","):
        runs.append((Run(f"conservativeness {text}", round(options.share * need)), float(text)))
    for run, conservativeness in runs:
        run_one(options, run, workload, conservativeness)
    fitting = None if options.no_fitting else runs[0][0].rate
    print(f"{'':>22} {'pages':>8} {'finished':>9} {'failed':>7} {'tokens/s':>9} {'of fitting':>10}")
    for run, _ in runs:
        part = f"{run.rate / fitting:10.2f}" if fitting else ""
        print(f"{run.name:>22} {run.num_pages:8} {run.finished:9} {run.failed:7} {run.rate:9.0f} {part}")
    wanted = 0 if options.seconds else options.prompts
    if any(run.failed or run.stands_still or run.finished < wanted for run, _ in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
