"""The open writes of one endpoint, and the threads that send their batches: what backends with blocking calls share.

start (loop): pieces -> batches -> the lane's queue; a worker: begin, send; then the loop is told how it ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stagemesh.shared.errors import Exhausted, StagemeshError
from stagemesh.shared.transfer.base import Lane, Piece, Region, RegionKey
from stagemesh.shared.transfer.batches import Batch, check_pieces, cut, join_neighbours
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.workers import Workers


@dataclass(frozen=True, slots=True)
class Failure:
    """`proven`: nothing of the batch is in flight."""

    error: StagemeshError
    proven: bool


class Limits(Protocol):
    """What bounds the writes: a batch's bytes and pieces, bulk batches under way, writes that are open."""

    @property
    def max_batch_bytes(self) -> int: ...
    @property
    def max_batch_pieces(self) -> int: ...
    @property
    def num_bulk_threads(self) -> int: ...
    @property
    def max_open_writes(self) -> int: ...


Send = Callable[[str, Batch, Lane], Failure | None]


class Writes:
    """`send(endpoint, batch, lane)` runs on a worker thread: it returns None once all is applied at the target, and
    does not raise. Each thread calls `prepare` before anything else."""

    def __init__(self, send: Send, limits: Limits, prepare: Callable[[], None] | None = None) -> None:
        self.num_unproven = 0  # writes that have failed and that the backend may still read for
        self._send, self._limits = send, limits
        self._open: set[Transfer] = set()
        self._workers = {
            Lane.BULK: Workers(limits.num_bulk_threads, "transfer-bulk", prepare),
            Lane.URGENT: Workers(1, "transfer-urgent", prepare),
        }

    def start(self, key: RegionKey, pieces: Sequence[Piece], lane: Lane, regions: Sequence[Region]) -> Transfer:
        """Raises Exhausted or ProtocolViolation, before anything is sent."""
        if len(self._open) >= self._limits.max_open_writes:
            raise Exhausted(f"{len(self._open)} writes are open")
        check_pieces(pieces, key, regions)
        batches = cut(
            join_neighbours(pieces),
            max_bytes=self._limits.max_batch_bytes,
            max_pieces=self._limits.max_batch_pieces,
        )
        transfer = Transfer(
            num_pieces=len(pieces),
            num_bytes=sum(batch.num_bytes for batch in batches),
            num_batches=len(batches),
            on_settled=self._settled,
        )
        if batches:
            self._open.add(transfer)
            loop = asyncio.get_running_loop()
            for batch in batches:
                self._workers[lane].submit(partial(self._send_one, key.endpoint, transfer, batch, lane, loop))
        return transfer

    async def end(self) -> None:
        """Cancels what is queued, waits for what runs, and ends the threads. Idempotent."""
        for transfer in self._open:
            transfer.cancel()
        for transfer in tuple(self._open):
            await transfer.settle()
        for workers in self._workers.values():
            workers.stop()  # nothing runs any more: the join is immediate

    def _settled(self, transfer: Transfer) -> None:
        self._open.discard(transfer)
        self.num_unproven += not transfer.quiescent

    def _send_one(
        self, endpoint: str, transfer: Transfer, batch: Batch, lane: Lane, loop: asyncio.AbstractEventLoop
    ) -> None:
        """On a worker thread: one batch, from the decision to send it to telling the loop how it ended."""
        end: Callable[[], None]
        if not transfer.begin():
            end = transfer.batch_skipped
        elif (failure := self._send(endpoint, batch, lane)) is None:
            end = partial(transfer.batch_done, batch.num_bytes)
        else:
            transfer.stop()  # now, not when the loop gets to it
            end = partial(transfer.batch_failed, bare(failure.error), proven=failure.proven)
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(end)


def bare(error: StagemeshError) -> StagemeshError:
    """Without its history: the frames there would keep the library alive for as long as somebody keeps the error."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
