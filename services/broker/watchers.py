"""Those who are told of changes in the directory: routers and heads, a bounded queue each."""

from __future__ import annotations

import asyncio

from stagemesh.services.broker.directory import Change, Directory
from stagemesh.shared.codec.mesh import instance_to_pb, ref_to_pb
from stagemesh.shared.pb import broker_pb2

MAX_QUEUED = 1_000

Updates = asyncio.Queue[broker_pb2.DirectoryUpdate | None]


class Watchers:
    """One that does not keep up gets None, the end: it comes back for a snapshot."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._queues: set[Updates] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def add(self) -> Updates:
        """A queue that begins with a snapshot."""
        queue: Updates = asyncio.Queue(MAX_QUEUED)
        changed = [instance_to_pb(info) for info in self._directory]
        queue.put_nowait(broker_pb2.DirectoryUpdate(snapshot=True, changed=changed))
        self._queues.add(queue)
        return queue

    def remove(self, queue: Updates) -> None:
        self._queues.discard(queue)

    def tell(self, change: Change) -> None:
        update = broker_pb2.DirectoryUpdate(
            changed=[instance_to_pb(info) for info in change.changed],
            removed=[ref_to_pb(ref) for ref in change.removed],
        )
        for queue in list(self._queues):
            if queue.qsize() >= MAX_QUEUED - 1:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(update)
