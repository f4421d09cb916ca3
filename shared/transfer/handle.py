"""The life of one write, as counters of its batches. Both backends drive it.

begin (worker) --> batch_done | batch_failed | batch_skipped (loop), once a batch; with the last one it is settled

`begin` and `stop` may be called by any thread; everything else belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stagemesh.shared.errors import Cancelled, StagemeshError
from stagemesh.shared.transfer.base import TransferState


class Transfer:
    """A TransferHandle. `on_settled` is called once, when the last batch has ended."""

    __slots__ = (
        "_error",
        "_num_open",
        "_num_skipped",
        "_num_unproven",
        "_on_settled",
        "_started",
        "_stopped",
        "_waiters",
        "bytes_done",
        "num_bytes",
        "num_pieces",
    )

    def __init__(
        self, *, num_pieces: int, num_bytes: int, num_batches: int, on_settled: Callable[[Transfer], None]
    ) -> None:
        self.num_pieces = num_pieces
        self.num_bytes = num_bytes
        self.bytes_done = 0
        self._num_open = num_batches
        self._num_skipped = 0
        self._num_unproven = 0
        self._error: StagemeshError | None = None
        self._started = self._stopped = False
        self._waiters: list[asyncio.Future[None]] = []
        self._on_settled = on_settled
        if not num_batches:
            on_settled(self)

    @property
    def settled(self) -> bool:
        return not self._num_open

    @property
    def state(self) -> TransferState:
        if self._num_open:
            return TransferState.ACTIVE if self._started else TransferState.QUEUED
        if self._error is not None:
            return TransferState.FAILED
        return TransferState.CANCELLED if self._num_skipped else TransferState.DONE

    @property
    def error(self) -> StagemeshError | None:
        if self.state is TransferState.CANCELLED:
            return Cancelled(f"write cancelled after {self.bytes_done} of {self.num_bytes} bytes")
        return self._error

    @property
    def quiescent(self) -> bool:
        return self.settled and not self._num_unproven

    def cancel(self) -> None:
        self._stopped = True

    async def settle(self) -> TransferState:
        if self._num_open:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self.state

    async def wait(self) -> None:
        await self.settle()
        if (error := self.error) is not None:
            raise error

    def begin(self) -> bool:
        """True if the next batch may be submitted; False if it is to be skipped."""
        if self._stopped:
            return False
        self._started = True
        return True

    def stop(self) -> None:
        """No further batch begins. A worker calls it as soon as it sees a failure."""
        self._stopped = True

    def batch_done(self, num_bytes: int) -> None:
        self.bytes_done += num_bytes
        self._batch_ended()

    def batch_skipped(self) -> None:
        self._num_skipped += 1
        self._batch_ended()

    def batch_failed(self, error: StagemeshError, *, proven: bool) -> None:
        """`proven`: nothing of this batch is in flight. The first error is the one that is kept."""
        self._stopped = True
        self._error = self._error or error
        self._num_unproven += not proven
        self._batch_ended()

    def _batch_ended(self) -> None:
        assert self._num_open > 0, self
        self._num_open -= 1
        if self._num_open:
            return
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._on_settled(self)

    def __repr__(self) -> str:
        return f"<Transfer {self.state.value} {self.bytes_done}/{self.num_bytes} bytes, {self.num_pieces} pieces>"
