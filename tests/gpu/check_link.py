"""The device-ordered ring between two processes, on one GPU or two: data, order, and how long a hop takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from stagemesh.shared.core.directory import RegionKey
from stagemesh.shared.link.cuda_ring import DeviceInbox, DeviceOutbox
from stagemesh.shared.link.ring import RingSpec

STEPS, SLOTS, BYTES = 400, 3, 64 * 4096 * 2


def peer() -> None:
    """Sends back what comes, one more in each element."""
    inbox = DeviceInbox(num_slots=SLOTS, slot_bytes=BYTES)
    print(inbox.spec.key.endpoint, inbox.spec.key.address, inbox.spec.key.length, flush=True)
    endpoint, address, length = sys.stdin.readline().split()
    outbox = DeviceOutbox(RingSpec(RegionKey(endpoint, int(address), int(length)), SLOTS, BYTES))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(1, STEPS + 1):
            inbox.wait(stream, step)
            outbox.send(stream, step, inbox.slot(step) + 1)
            if step % SLOTS == 0:
                stream.synchronize()
    stream.synchronize()
    print("done", flush=True)
    sys.stdin.readline()


def run_pair(other_gpu: str) -> list[float]:
    """Round trips in microseconds: two hops and a small kernel."""
    child = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": other_gpu},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    inbox = DeviceInbox(num_slots=SLOTS, slot_bytes=BYTES)
    endpoint, address, length = child.stdout.readline().split()
    key = inbox.spec.key
    child.stdin.write(f"{key.endpoint} {key.address} {key.length}\n")
    child.stdin.flush()
    outbox = DeviceOutbox(RingSpec(RegionKey(endpoint, int(address), int(length)), SLOTS, BYTES))
    stream, times = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for step in range(1, STEPS + 1):
            data = torch.full((BYTES,), step % 200, dtype=torch.uint8, device="cuda")
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            outbox.send(stream, step, data)
            inbox.wait(stream, step)
            done.record(stream)
            back = inbox.slot(step)
            assert int(back[0]) == int(back[-1]) == step % 200 + 1
            times.append(begun.elapsed_time(done) * 1e3)
    assert child.stdout.readline() == "done\n"
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()
    outbox.close()
    return sorted(times)


def test_there_and_back() -> None:
    gpus = ["0"] if torch.cuda.device_count() == 1 else ["0", "1"]
    for other in gpus:
        start_s = time.monotonic()
        times = run_pair(other)
        print(
            f"hop to GPU {other} and back, 512 KiB: p50 {times[len(times) // 2]:.1f} us, "
            f"p99 {times[len(times) * 99 // 100]:.1f} us ({time.monotonic() - start_s:.1f} s)"
        )


if __name__ == "__main__":
    peer()
