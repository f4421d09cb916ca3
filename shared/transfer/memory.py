"""The in-memory twin: endpoints of one process that copy for each other, with faults on demand.

write --> queue of the endpoint (urgent first) --> one batch a turn of the loop --> copied | parked | failed

Everything happens on the loop's thread. Faults are the fabric's, so a test reaches them whoever writes.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stagemesh.shared.errors import PeerLost, Rejected, Retryable
from stagemesh.shared.transfer.base import Lane, Piece, Region, RegionKey
from stagemesh.shared.transfer.batches import Batch, check_pieces, cut, join_neighbours
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.regions import RegionTable


@dataclass(slots=True)
class Faults:
    """What goes wrong next. Counters count batches."""

    num_to_fail: int = 0
    failure_is_proven: bool = True
    num_to_corrupt: int = 0  # batches that arrive, but for their first byte
    num_to_pass: int | None = None  # batches that still pass before the next one is parked; None: no limit
    lost: set[str] = field(default_factory=set)
    parked: asyncio.Event = field(default_factory=asyncio.Event)  # set while a batch is parked

    def fail_next(self, count: int, *, proven: bool = True) -> None:
        """The next `count` batches fail; not `proven` leaves their writes without quiescence."""
        self.num_to_fail, self.failure_is_proven = count, proven

    def lose(self, endpoint: str) -> None:
        """Writes to `endpoint` fail with PeerLost from now on."""
        self.lost.add(endpoint)


@dataclass(frozen=True, slots=True)
class Job:
    transfer: Transfer
    target: str
    batch: Batch


class MemoryFabric:
    """The endpoints that can reach each other, by name."""

    def __init__(self) -> None:
        self.endpoints: dict[str, MemoryEndpoint] = {}
        self.faults = Faults()
        self._parked: list[tuple[MemoryEndpoint, Job]] = []
        self._released = asyncio.Event()

    def hold(self, *, after_batches: int = 0) -> None:
        """Parks every batch but the next `after_batches`: submitted, in flight, and not applied until `release`."""
        self.faults.num_to_pass = after_batches

    def release(self) -> None:
        """Applies what is parked and holds no more."""
        self.faults.num_to_pass = None
        self.faults.parked.clear()
        parked, self._parked = self._parked, []
        for endpoint, job in parked:
            endpoint.apply(job)
        self._released.set()

    def end(self, name: str) -> None:
        """The endpoint's process is killed and reaped: it starts nothing more, and what is parked is on its way."""
        self.endpoints.pop(name).ended = True

    async def until_read(self, target: str) -> None:
        """Returns when nothing is on its way to `target` from an endpoint that has ended."""
        while any(endpoint.ended and job.target == target for endpoint, job in self._parked):
            self._released.clear()
            await self._released.wait()

    def parks(self, endpoint: MemoryEndpoint, job: Job) -> bool:
        """True if the batch was parked instead of passed."""
        if self.faults.num_to_pass is None:
            return False
        if self.faults.num_to_pass > 0:
            self.faults.num_to_pass -= 1
            return False
        self._parked.append((endpoint, job))
        self.faults.parked.set()
        return True


class MemoryEndpoint:
    """An Endpoint over `ctypes.memmove`. Raises Rejected if the fabric has an endpoint of that name."""

    def __init__(
        self, fabric: MemoryFabric, name: str, *, max_batch_bytes: int = 16 << 20, max_batch_pieces: int = 256
    ) -> None:
        if name in fabric.endpoints:
            raise Rejected("name", f"is taken: {name}")
        self.name = name
        self._fabric = fabric
        self._max_bytes, self._max_pieces = max_batch_bytes, max_batch_pieces
        self._regions = RegionTable()
        self._queues: dict[Lane, deque[Job]] = {Lane.URGENT: deque(), Lane.BULK: deque()}
        self._open: set[Transfer] = set()
        self._pumping = self._closed = False
        self.ended = False
        fabric.endpoints[name] = self

    def register(self, memory: torch.Tensor) -> Region:
        if memory.device.type != "cpu":
            raise Rejected("memory", f"must be on the CPU, is on {memory.device}")
        region = self._regions.bounds(memory)
        self._regions.add(region, memory)
        return region

    def unregister(self, region: Region) -> None:
        self._regions.remove(region)

    def publish(self, region: Region) -> RegionKey:
        return self._regions.key(self.name, region)

    def write(self, key: RegionKey, pieces: Sequence[Piece], lane: Lane = Lane.BULK) -> Transfer:
        if self._closed:
            raise Retryable(f"endpoint {self.name} is closed")
        check_pieces(pieces, key, self._regions.regions)
        batches = cut(join_neighbours(pieces), max_bytes=self._max_bytes, max_pieces=self._max_pieces)
        transfer = Transfer(
            num_pieces=len(pieces),
            num_bytes=sum(batch.num_bytes for batch in batches),
            num_batches=len(batches),
            on_settled=self._open.discard,
        )
        if batches:
            self._open.add(transfer)
            self._queues[lane].extend(Job(transfer, key.endpoint, batch) for batch in batches)
            self._schedule()
        return transfer

    async def read_out(self) -> None:
        await self._fabric.until_read(self.name)

    async def close(self) -> None:
        self._closed = True
        self._fabric.endpoints.pop(self.name, None)
        for transfer in self._open:
            transfer.cancel()
        for transfer in tuple(self._open):
            await transfer.settle()
        for region in self._regions.regions:
            self._regions.remove(region)

    def apply(self, job: Job) -> None:
        """Copies one batch, or fails it as the faults say."""
        faults, target = self._fabric.faults, self._fabric.endpoints.get(job.target)
        if target is None or job.target in faults.lost:
            job.transfer.batch_failed(PeerLost(f"no endpoint {job.target}"), proven=True)
        elif faults.num_to_fail > 0:
            faults.num_to_fail -= 1
            error = Retryable(f"write to {job.target} failed on demand")
            job.transfer.batch_failed(error, proven=faults.failure_is_proven)
        elif not all(map(target._regions.covers, job.batch.targets, job.batch.lengths)):
            job.transfer.batch_failed(Retryable(f"{job.target} has not registered the target"), proven=True)
        else:
            for to, source, length in zip(job.batch.targets, job.batch.sources, job.batch.lengths, strict=True):
                ctypes.memmove(to, source, length)
            if faults.num_to_corrupt > 0:
                faults.num_to_corrupt -= 1
                ctypes.c_ubyte.from_address(job.batch.targets[0]).value ^= 1
            job.transfer.batch_done(job.batch.num_bytes)

    def _schedule(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """One batch a turn, so that a test can act between two."""
        self._pumping = False
        if self.ended:
            return
        queue = next((queue for queue in self._queues.values() if queue), None)
        if queue is None:
            return
        job = queue.popleft()
        if not job.transfer.begin():
            job.transfer.batch_skipped()
        elif not self._fabric.parks(self, job):
            self.apply(job)
        self._schedule()
