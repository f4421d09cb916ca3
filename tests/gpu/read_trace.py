"""What the traces of a decode pipeline's stages say (`stagemesh profile`, or `bench_mesh.py --trace`): how long steps
are on the device, what lies between them, and how long a hop is, from a stage's last kernel to the next one's first.

python tests/gpu/read_trace.py TRACE_OF_STAGE_0 TRACE_OF_STAGE_1 ...
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The kernels of a step, by the device's clock, microseconds."""

    start: float
    end: float
    kernels: int
    first: str
    last: str


def device_events(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    offset = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = [{**e, "ts": e["ts"] + offset} for e in trace["traceEvents"] if e.get("cat") in DEVICE]
    return sorted(events, key=lambda event: float(event["ts"]))


def device_steps(events: list[dict[str, Any]]) -> list[DeviceStep]:
    """Cut before every kernel that a step begins with: the embedding or, on later stages, the copy out of the inbox,
    which is the copy that a kernel follows."""
    steps: list[list[dict[str, Any]]] = []
    for event, after in zip(events, [*events[1:], {}], strict=True):
        is_copy = "memcpy32" in event["name"] or "DtoD" in event["name"]
        if "_embed" in event["name"] or (is_copy and after.get("cat") == "kernel" and "_embed" not in after["name"]):
            steps.append([])
        if steps and (event["cat"] == "kernel" or not steps[-1]):
            steps[-1].append(event)
    return [
        DeviceStep(s[0]["ts"], max(e["ts"] + e["dur"] for e in s), len(s), s[0]["name"], s[-1]["name"])
        for s in steps[:-1]
    ]


def spread(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us, of {len(values)}"


def hops(before: list[DeviceStep], after: list[DeviceStep]) -> list[float]:
    """From the end of each step of a stage to the first start at the next stage that follows it."""
    starts, found = np.array([step.start for step in after]), []
    for step in before:
        at = int(np.searchsorted(starts, step.end))
        if at < len(starts):
            found.append(float(starts[at]) - step.end)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    options = parser.parse_args()
    stages = []
    for path in options.traces:
        events = device_events(path)
        steps = device_steps(events)
        stages.append(steps)
        print(f"{path.name}: {len(events)} on the device, {len(steps)} steps")
        if not steps:
            continue
        print(f"  first kernel {steps[0].first[:70]}, last {steps[0].last[:70]}, {steps[0].kernels} in all")
        print(f"  a step: {spread([step.end - step.start for step in steps])}")
        gaps = [b.start - a.end for a, b in pairwise(steps)]
        print(f"  between two: {spread(gaps)}")
        moves = [event for event in events if event["cat"] == "gpu_memcpy"]
        print(f"  copies: {len(moves) / max(1, len(steps)):.1f} a step, {sum(m['dur'] for m in moves):.0f} us in all")
    for rank, (before, after) in enumerate(zip(stages, stages[1:] + stages[:1], strict=True)):
        print(f"hop {rank} -> {(rank + 1) % len(stages)}: {spread(hops(before, after))}")


if __name__ == "__main__":
    main()
