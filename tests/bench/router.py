"""How many tokens one router process carries: a real router between engines that compute nothing and real clients.

    PYTHONPATH=.ns python tests/bench/router.py [--streams 500] [--tokens 300] [--paces 40,0]
        [--clients 1] [--spread] [--model smollm2]

A pace is decode steps a second, each with a token for every stream; 0 is as fast as the router takes them, which then
joins steps into one message where a client's stream has not been served yet. The router is kept on one core and the
rest on the others. Rates and CPU are of the time in which every stream is live. Each pace has two rounds on one router,
whose memory should not grow from one to the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from stagemesh.shared.bench.drive import Measurement, measure
from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.stats import spread
from stagemesh.shared.bench.workload import Workload
from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.local import LocalLayout, RoleLayout, local_document
from stagemesh.shared.config.write import dump_toml
from stagemesh.shared.model.source import open_model
from stagemesh.shared.runtime.loop import run

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 10.0
ROUNDS: Final = 2
SAMPLE_S: Final = 0.1
INPUT_TOKENS: Final = 32
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a process: CLOCK_MONOTONIC, CPU seconds so far, resident MiB."""

    at_s: float
    cpu_s: float
    rss_mib: float


def sample(pid: int) -> Sample:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    ticks = int(fields[11]) + int(fields[12])
    return Sample(time.monotonic(), ticks / CLOCK_TICKS, pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20))


@contextmanager
def process(*arguments: str, core: set[int], stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """`python -m ...` on the cores of `core`, gone at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.ns'}:{ROOT}", "STAGEMESH_LOG": "json"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    os.sched_setaffinity(child.pid, core)  # before it has threads, which inherit it
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def router_address(router: subprocess.Popen[str]) -> str:
    """Where it listens, once it is up; what it says afterwards is read and dropped."""
    assert router.stderr is not None
    heard = []
    for line in router.stderr:
        heard.append(line)
        said = json.loads(line) if line.startswith("{") else {}
        if said.get("msg") == "router is up":
            threading.Thread(target=router.stderr.read, daemon=True).start()
            return str(said["address"])
    raise SystemExit("the router did not start:\n" + "".join(heard))


@dataclass(frozen=True, slots=True)
class Round:
    """One round's measurement with samples of the router and of the engines."""

    measured: Measurement
    router: list[Sample]
    engines: list[Sample]

    @property
    def window_s(self) -> tuple[float, float]:
        """While every stream was live, on CLOCK_MONOTONIC."""
        first = max(record.message_s[0] for record in self.measured.records)
        last = min(record.message_s[-1] for record in self.measured.records)
        return self.measured.start_s + first, self.measured.start_s + last

    def received(self) -> tuple[int, int]:
        """Tokens and messages in the window."""
        lo, hi = (edge - self.measured.start_s for edge in self.window_s)
        counts = [
            count
            for record in self.measured.records
            for at_s, count in zip(record.message_s, record.message_tokens, strict=True)
            if lo < at_s <= hi
        ]
        return sum(counts), len(counts)

    def cpu(self, samples: list[Sample]) -> float:
        """Cores in use in the window."""
        lo, hi = np.interp(self.window_s, [s.at_s for s in samples], [s.cpu_s for s in samples])
        return float(hi - lo) / (self.window_s[1] - self.window_s[0])

    def row(self, pace: float) -> str:
        seconds = self.window_s[1] - self.window_s[0]
        tokens, messages = self.received()
        rate, router = tokens / seconds, self.cpu(self.router)
        itl = spread([gap for record in self.measured.records for gap in record.itl_s])
        rss = [s.rss_mib for s in self.router]
        return (
            f"{pace:>6.0f} {seconds:>8.1f} {rate:>9.0f} {router:>8.2f} {rate / router:>10.0f} {tokens / messages:>8.2f}"
            f" {messages / seconds:>8.0f} {itl.p99 * 1e3:>8.0f} {rss[0]:>7.1f} {max(rss):>7.1f} {rss[-1]:>7.1f}"
            f" {self.cpu(self.engines):>8.2f} {self.measured.max_lag_s * 1e3:>8.0f}"
        )


HEADER: Final = (
    f"{'pace':>6} {'window s':>8} {'tokens/s':>9} {'cores':>8} {'tok/core-s':>10} {'tok/msg':>8} {'msg/s':>8}"
    f" {'ITL P99':>8} {'MiB':>7} {'most':>7} {'after':>7} {'engines':>8} {'lag ms':>8}"
)


async def sampled(load: Load, router_pid: int, engines_pid: int) -> Round:
    router, engines = [sample(router_pid)], [sample(engines_pid)]

    async def keep_sampling() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            router.append(sample(router_pid))
            engines.append(sample(engines_pid))

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        sampler = group.create_task(keep_sampling())
        measured = await measure(load)
        sampler.cancel()
    router.append(sample(router_pid))
    engines.append(sample(engines_pid))
    failures = {record.failure for record in measured.records if record.failure}
    if failures:
        raise SystemExit(f"requests failed: {failures}")
    return Round(measured, router, engines)


def make_config(run_dir: Path, model: str) -> Config:
    """One stage an instance: only heads are asked for."""
    document = local_document(LocalLayout(model, 0, prefill=RoleLayout(1), decode=RoleLayout(1)), run_dir)
    return build_config(document, source="the benchmark", environ={})


def bench(options: argparse.Namespace, pace: float, cores: list[set[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = make_config(Path(folder), options.model)
        path = Path(folder) / "mesh.toml"
        path.write_text(dump_toml(config))
        script = ("tests.support.scripted_engines", str(path), str(options.streams), str(pace))
        engines = stack.enter_context(process(*script, core=cores[1]))
        assert engines.stdout is not None
        if engines.stdout.readline() != "ready\n":
            raise SystemExit("the engines did not start")
        service = ("stagemesh.services.router", "--config", str(path))
        router = stack.enter_context(process(*service, core=cores[0], stderr=subprocess.PIPE))
        address = router_address(router)
        vocab_size = open_model(options.model).config.vocab_size
        load = Load(
            address,
            Workload(options.streams, INPUT_TOKENS, options.tokens, vocab_size),
            num_processes=options.clients,
            timeout_s=LIMIT_S,
        )
        for _ in range(ROUNDS):
            print(run(sampled(load, router.pid, engines.pid)).row(pace), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--paces", default="40,0")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--spread", action="store_true", help="all processes on all cores")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then either
    everything = sorted(os.sched_getaffinity(0))
    cores = [{everything[0]}, set(everything[1:]) or {everything[0]}]
    if options.spread:
        cores = [set(everything), set(everything)]
    os.sched_setaffinity(0, cores[1])  # the clients are started from here
    print(HEADER)
    for pace in options.paces.split(","):
        bench(options, float(pace), cores)


if __name__ == "__main__":
    main()
