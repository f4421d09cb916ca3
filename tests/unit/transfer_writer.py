"""A process that writes to a target: one range once, or for good.

python transfer_writer.py BACKEND ENDPOINT ADDRESS LENGTH OFFSET NUM_BYTES BYTE
-> "writing" when a first write has been applied; "once" on its input -> writes the range, "done"; "for good" -> until
it is killed, "again" after each round
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import torch

from stagemesh.shared.transfer.base import Piece, RegionKey
from tests.unit.transfer_target import open_backend


class WriterProcess:
    """That process, seen from the test."""

    def __init__(self, backend: str, key: RegionKey, *, offset: int, num_bytes: int, byte: int) -> None:
        arguments = (backend, key.endpoint, key.address, key.length, offset, num_bytes, byte)
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def close(self) -> None:
        """Kills the process, whatever it is doing, and reaps it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


async def main() -> None:
    backend, name, *numbers = sys.argv[1:]
    address, length, offset, num_bytes, byte = map(int, numbers)
    torch.set_num_threads(1)
    endpoint, key = open_backend(backend), RegionKey(name, address, length)
    region = endpoint.register(torch.full((num_bytes,), byte, dtype=torch.uint8))
    await endpoint.write(key, [Piece(region.address, address + offset, 1)]).wait()
    print("writing", flush=True)
    forever = sys.stdin.readline().strip() == "for good"
    while True:
        await endpoint.write(key, [Piece(region.address, address + offset, num_bytes)]).wait()
        print("again" if forever else "done", flush=True)
        if not forever:
            break
    sys.stdin.readline()
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main())
