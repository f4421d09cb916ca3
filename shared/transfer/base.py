"""The adapter to one-sided writes between processes: what a backend offers, and the words for it.

register --> publish --(key travels to the peer)--> write --> TransferHandle
                                     queued --> active --> done | failed | cancelled

An endpoint belongs to one event loop: every method, and every change of a handle, happens on that loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from stagemesh.shared.core.directory import RegionKey as RegionKey

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that is registered: `length` bytes from `address` on."""

    address: int
    length: int

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes from the local address `source` to the peer's address `target`; both absolute."""

    source: int
    target: int
    length: int


class Lane(Enum):
    """Which queue a write waits in. Urgent writes are small (activations) and never wait behind a bulk one."""

    BULK = "bulk"
    URGENT = "urgent"


class TransferState(Enum):
    QUEUED = "queued"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL_STATES: Final = frozenset({TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED})


class TransferHandle(Protocol):
    """One write under way. A final state is reached only when no call of this write is running any more."""

    @property
    def state(self) -> TransferState: ...

    @property
    def error(self) -> Exception | None:
        """Why it failed (Retryable or PeerLost) or Cancelled; None otherwise.

        A peer that is just dying may still show as Retryable: whether it lives is for the directory to say.
        """
        ...

    @property
    def quiescent(self) -> bool:
        """True if it is proven that no byte of this write is in flight and none will be applied any more.

        False while it runs, and for good after a failure that the backend cannot explain: bytes may still land then,
        so the target's pages stay in quarantine until the proof comes from elsewhere.
        """
        ...

    @property
    def num_pieces(self) -> int:
        """Pieces asked for."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes asked for."""
        ...

    @property
    def bytes_done(self) -> int:
        """Bytes known to be applied at the target."""
        ...

    def cancel(self) -> None:
        """Submits no more of this write. What is submitted runs on: `wait` and `settle` return after it.

        A write whose last byte was submitted already may still end `done`.
        """
        ...

    async def settle(self) -> TransferState:
        """Waits for the final state and returns it. Cancelling the waiting task does not cancel the write."""
        ...

    async def wait(self) -> None:
        """As `settle`, but raises what went wrong: Retryable, PeerLost, or Cancelled after `cancel`."""
        ...


class Endpoint(Protocol):
    """This process's end of a transfer backend.

    A source must stay unchanged, and every region of a write registered, until the write has settled.
    """

    @property
    def name(self) -> str:
        """Who this is to peers; opaque to them, and inside of every key. New at every start, so nothing of an old one
        is reused."""
        ...

    def register(self, memory: torch.Tensor) -> Region:
        """Registers a contiguous tensor's bytes, as source and as target, and keeps it alive until `unregister`.

        Raises Rejected if the tensor is not contiguous, empty, or overlaps a registered region; Retryable if the
        backend refuses it.
        """
        ...

    def unregister(self, region: Region) -> None:
        """Ends a registration. No write may use the region any more; an unknown region is a no-op.

        This is no proof that peers have stopped writing to it.
        """
        ...

    def publish(self, region: Region) -> RegionKey:
        """The key by which peers write into `region`. Raises Rejected if it is not registered here."""
        ...

    def write(self, key: RegionKey, pieces: Sequence[Piece], lane: Lane = Lane.BULK) -> TransferHandle:
        """Starts writing `pieces`, in no particular order. Done means: applied at the target.

        Raises ProtocolViolation, before anything is sent, if a piece is empty, or not inside one registered region
        and inside `key`'s range; Exhausted if too many writes are open; Retryable once the endpoint is closed.
        """
        ...

    async def read_out(self) -> None:
        """Returns once nothing can be applied here any more that a process has sent which ended before the call, and
        whose host has nothing of it left to send. That both are so is the caller's to prove. Raises Rejected where
        nothing can prove that."""
        ...

    async def close(self) -> None:
        """Cancels what is queued, waits for what runs, and ends every registration. Idempotent."""
        ...
