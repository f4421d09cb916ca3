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

    def __init__(self, directory: Directory, broker: str) -> None:
        """`broker` says which start of the broker this is."""
        self._directory, self._broker = directory, broker
        self.gathering = True  # more instances may come back than a snapshot shows
        self._queues: set[Updates] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def add(self) -> Updates:
        """A queue that begins with a snapshot."""
        queue: Updates = asyncio.Queue(MAX_QUEUED)
        queue.put_nowait(self._snapshot())
        self._queues.add(queue)
        return queue

    def gathered(self) -> None:
        """Who is not here is gone."""
        self.gathering = False
        self._put(self._snapshot())

    def _snapshot(self) -> broker_pb2.DirectoryUpdate:
        changed = [instance_to_pb(info) for info in self._directory]
        return broker_pb2.DirectoryUpdate(snapshot=True, changed=changed, gathering=self.gathering, broker=self._broker)

    def remove(self, queue: Updates) -> None:
        self._queues.discard(queue)

    def tell(self, change: Change) -> None:
        update = broker_pb2.DirectoryUpdate(
            changed=[instance_to_pb(info) for info in change.changed],
            removed=[ref_to_pb(ref) for ref in change.removed],
        )
        self._put(update)

    def _put(self, update: broker_pb2.DirectoryUpdate) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= MAX_QUEUED - 1:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(update)
