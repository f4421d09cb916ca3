"""How fast each transfer backend writes to another process on this host: latency and bandwidth by size and by pieces,
and what an urgent write costs while a bulk one runs. Between GPUs: tests/gpu/check_transfer.py.

    PYTHONPATH=.ns:. python tests/bench/transfer.py [--backend mooncake|nixl|nixl-tcp] [--max-mib 256]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
import uvloop

from stagemesh.shared.transfer.base import FINAL_STATES, Endpoint, Lane, Piece, Region, RegionKey, TransferHandle
from tests.unit.transfer_target import BETWEEN_PROCESSES, TargetProcess, capabilities, open_backend

KIB, MIB = 1 << 10, 1 << 20
BATCH_BYTES = 16 * MIB  # what a mesh asks for


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class TransferBench:
    def __init__(self, endpoint: Endpoint, region: Region, key: RegionKey) -> None:
        self.endpoint, self.region, self.key = endpoint, region, key

    def write(self, length: int, num_pieces: int, lane: Lane) -> TransferHandle:
        """Pieces that are no neighbours: the order at the target is reversed."""
        last = (num_pieces - 1) * length
        pieces = [
            Piece(self.region.address + i * length, self.key.address + last - i * length, length)
            for i in range(num_pieces)
        ]
        return self.endpoint.write(self.key, pieces, lane)

    async def times_s(self, start: Callable[[], TransferHandle], count: int) -> list[float]:
        times = []
        for _ in range(count):
            before = time.perf_counter()
            await start().wait()
            times.append(time.perf_counter() - before)
        return sorted(times)

    async def row(self, length: int, num_pieces: int, lane: Lane) -> None:
        total = length * num_pieces
        count = max(5, min(300, (256 * MIB) // total))
        before = cpu_s()
        times = await self.times_s(lambda: self.write(length, num_pieces, lane), count)
        median = times[count // 2]
        print(
            f"{lane.value:>7} {length / KIB:>9.0f} KiB x {num_pieces:<5} median {median * 1e6:>9.0f} us"
            f"  p99 {times[count * 99 // 100] * 1e6:>9.0f} us  {total / median / 1e9:>6.2f} GB/s"
            f"  cpu {(cpu_s() - before) / count * 1e6:>8.0f} us"
        )


async def bench(backend: str, key: RegionKey, max_bytes: int) -> None:
    endpoint = open_backend(backend, capabilities(backend).batch_bytes(BATCH_BYTES))
    region = endpoint.register(torch.ones(max_bytes, dtype=torch.uint8))
    subject = TransferBench(endpoint, region, key)
    for lane in Lane:
        await subject.write(KIB, 1, lane).wait()

    print("by size")
    for length in (4 * KIB, 20 * KIB, 40 * KIB, 256 * KIB):
        for lane in Lane:
            await subject.row(length, 1, lane)
    for length in (MIB, 16 * MIB, max_bytes):
        await subject.row(length, 1, Lane.BULK)
    print("by pieces")
    for length, num_pieces in ((4 * KIB, 4096), (32 * KIB, 512), (128 * KIB, 128), (MIB, 16)):
        if length * num_pieces <= max_bytes:
            await subject.row(length, num_pieces, Lane.BULK)
    print("urgent while bulk runs")
    bulk = subject.write(max_bytes, 1, Lane.BULK)
    times: list[float] = []
    while bulk.state not in FINAL_STATES:
        times += await subject.times_s(lambda: subject.write(40 * KIB, 1, Lane.URGENT), 1)
    times.sort()
    print(
        f" {len(times)} writes of 40 KiB: median {times[len(times) // 2] * 1e6:.0f} us, worst {times[-1] * 1e6:.0f} us"
    )
    await endpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-mib", type=int, default=256)
    parser.add_argument("--backend", choices=BETWEEN_PROCESSES, help="one alone")
    arguments = parser.parse_args()
    max_bytes = arguments.max_mib * MIB
    torch.set_num_threads(1)
    for backend in [arguments.backend] if arguments.backend else BETWEEN_PROCESSES:
        print(f"== {backend}")
        target = TargetProcess(max_bytes, backend)
        try:
            uvloop.run(bench(backend, target.key, max_bytes))
        finally:
            target.close()


if __name__ == "__main__":
    main()
