"""What this process holds while it writes: files, threads, memory. An endpoint that is closed whatever happens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from stagemesh.shared.transfer.base import Endpoint
from tests.unit.transfer_target import MIB, open_backend

LET_GO_S = 20.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def opened(backend: str, max_batch_bytes: int = 4 * MIB) -> AsyncIterator[Endpoint]:
    endpoint = open_backend(backend, max_batch_bytes)
    try:
        yield endpoint
    finally:
        await endpoint.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds: files and sockets, threads of any kind, bytes of host memory."""

    files: int
    threads: int
    num_bytes: int


def held_now() -> Held:
    return Held(num_files(), len(os.listdir("/proc/self/task")), resident_bytes())


async def held_in_a_loop() -> Held:
    """As `returned_to` will count: a loop has files of its own."""
    return held_now()


async def returned_to(before: Held) -> Held:
    """What is held once no more files and threads are there than `before`: a library, and the kernel, let go of them in
    their own time. Raises TimeoutError if they stay."""
    async with asyncio.timeout(LET_GO_S):
        while (held := held_now()).files > before.files or held.threads > before.threads:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    return held
