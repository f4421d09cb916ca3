"""KV from GPU to GPU through the transfer endpoint, between two processes: the bytes arrive, and how fast."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
import torch

from stagemesh.shared.core.directory import RegionKey
from stagemesh.shared.transfer.base import Piece
from stagemesh.shared.transfer.mooncake import MooncakeEndpoint, MooncakeSettings

NUM_BYTES = 1 << 30


async def receive() -> None:
    endpoint = MooncakeEndpoint(MooncakeSettings(protocol="intranode"))
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    key = endpoint.publish(endpoint.register(memory))
    print(key.endpoint, key.address, key.length, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip():
            print(int(memory[:: 1 << 12].long().sum()), flush=True)
    await endpoint.close()


async def send(other_gpu: str, piece_bytes: int, count: int) -> float:
    """Bytes a second. Fails unless every piece arrives."""
    child = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, __file__],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": other_gpu},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        name, address, length = child.stdout.readline().split()
        key = RegionKey(name, int(address), int(length))
        endpoint = MooncakeEndpoint(MooncakeSettings(protocol="intranode"))
        memory = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        region = endpoint.register(memory)
        pieces = [
            Piece(region.address + i * piece_bytes, key.address + (2 * i + 1) * piece_bytes, piece_bytes)
            for i in range(count)
        ]
        await endpoint.write(key, pieces[:1]).wait()
        start_s = time.monotonic()
        await endpoint.write(key, pieces).wait()
        seconds = time.monotonic() - start_s
        child.stdin.write("sum\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == count * piece_bytes >> 12
        await endpoint.close()
    finally:
        child.stdin.close()
        child.wait(30)
        child.stdout.close()
    return count * piece_bytes / seconds


@pytest.mark.parametrize(("piece_bytes", "count"), [(1 << 20, 63), (1 << 20, 500), (64 << 20, 8)])
def test_pages_arrive(piece_bytes: int, count: int) -> None:
    for other in ["0"] if torch.cuda.device_count() == 1 else ["0", "1"]:
        rate = asyncio.run(send(other, piece_bytes, count))
        took_ms = count * piece_bytes / rate * 1e3
        print(f"{count} pieces of {piece_bytes >> 10} KiB to GPU {other}: {took_ms:.2f} ms, {rate / 1e9:.0f} GB/s")


if __name__ == "__main__":
    asyncio.run(receive())
