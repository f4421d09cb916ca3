"""Every backend with a target to write to: an endpoint beside for the in-memory one, else another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from stagemesh.shared.core.directory import RegionKey
from stagemesh.shared.transfer.base import Endpoint
from stagemesh.shared.transfer.memory import MemoryEndpoint, MemoryFabric
from tests.unit.transfer_target import TargetProcess, digest, open_backend

MIB = 1 << 20
TARGET_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Target:
    key: RegionKey
    digest: Callable[[int, int], str]
    count: Callable[[], int]
    clear: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Backend:
    """`open` makes the writer; it is called inside the test's loop."""

    open: Callable[[], Endpoint]
    target: Target
    lost_name: str


def memory_backend() -> Backend:
    fabric, memory = MemoryFabric(), torch.zeros(TARGET_BYTES, dtype=torch.uint8)
    endpoint = MemoryEndpoint(fabric, "target")
    target = Target(
        endpoint.publish(endpoint.register(memory)),
        partial(digest, memory),
        lambda: int(torch.count_nonzero(memory)),
        memory.zero_,
    )
    return Backend(partial(MemoryEndpoint, fabric, "writer", max_batch_bytes=4 * MIB), target, "nobody")


@contextmanager
def process_backend(backend: str) -> Iterator[Backend]:
    process, lost = TargetProcess(TARGET_BYTES, backend), TargetProcess(MIB, backend)
    lost.close()
    target = Target(process.key, process.digest, process.count, process.clear)
    try:
        yield Backend(partial(open_backend, backend), target, lost.key.endpoint)
    finally:
        process.close()
