"""How one batch is sent by the transfer engine, on a worker thread, and what is known when that has ended.

urgent: one synchronous call, which spins on a core until it is done: the shortest way for a few tens of KB
bulk:   submit every piece, then look at each until it has ended, with pauses. Spinning would take the core that the
        engine's only I/O thread needs (measured on two cores, 16 MiB: half the time and a third of the CPU), and the
        engine's batch status reports a failure while other pieces of the batch are still on their way.

A piece that ended well has been acknowledged by the target after its last byte was applied. One that failed may have
bytes left in a socket, so only a batch that never reached the engine counts as proven to be over; not one for a process
at the address of an earlier one, though: no write from here can ever reach it, and what helps is what is done about
writes in doubt: this process is started again.
"""

from __future__ import annotations

import socket
import time
from typing import Final, Protocol

from stagemesh.shared.errors import PeerLost, Retryable, StagemeshError
from stagemesh.shared.transfer.base import Lane
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.reach import connect
from stagemesh.shared.transfer.writes import Failure

PENDING: Final = 0
SUCCEEDED: Final = 1
NOT_SUBMITTED: Final = 0
FIRST_PAUSE_S: Final = 50e-6
LONGEST_PAUSE_S: Final = 1e-3
SLOWEST_BYTES_PER_S: Final = 16 << 20  # on top of the timeout: a link slower than this counts as broken


class Engine(Protocol):
    """What is used of the library. Addresses and lengths in bytes; a status of 0 is success unless said otherwise."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, length: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def batch_transfer_sync_write(
        self, peer: str, sources: list[int], targets: list[int], lengths: list[int], /
    ) -> int: ...
    def transfer_submit_write(self, peer: str, source: int, target: int, length: int, /) -> int:
        """The id of a transfer, or NOT_SUBMITTED."""
        ...

    def transfer_check_status(self, transfer_id: int, /) -> int:
        """PENDING, SUCCEEDED, or negative: failed. Except while pending, the id is void afterwards."""
        ...


class Sender:
    """Used by all worker threads at once: a race on what it remembers of peers repeats a look-up, no more."""

    def __init__(self, engine: Engine, *, timeout_s: float, connect_timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._reached: dict[str, str] = {}  # address -> incarnation; what the engine learnt of it, it keeps for good
        self._doubtful: set[str] = set()  # addresses at which the last write failed

    def send(self, address: str, incarnation: str, batch: Batch, lane: Lane) -> Failure | None:
        """None once the whole batch is applied at the target. Does not raise."""
        try:
            self._reach(address)
        except PeerLost as error:
            return Failure(error, proven=True)
        if self._reached.setdefault(address, incarnation) != incarnation:
            why = f"{address} is another process now; the transfer engine still knows the old one"
            return Failure(PeerLost(why), proven=False)
        try:
            if lane is Lane.URGENT:
                reason, proven = self._send_urgent(address, batch), False
            else:
                reason, proven = self._send_bulk(address, incarnation, batch)
        except PeerLost as error:
            return Failure(error, proven=True)
        except Exception as error:  # the library's own, mapped here once
            reason, proven = repr(error), False
        return None if reason is None else Failure(self._explain(address, batch, reason), proven)

    def _send_urgent(self, address: str, batch: Batch) -> str | None:
        code = self._engine.batch_transfer_sync_write(address, batch.sources, batch.targets, batch.lengths)
        return None if code == 0 else f"code {code}"

    def _send_bulk(self, address: str, incarnation: str, batch: Batch) -> tuple[str | None, bool]:
        """Why it failed, if it did, and whether it is proven that nothing is in flight. Raises PeerLost where nothing
        was sent."""
        submitted: list[int] = []
        for source, target, length in zip(batch.sources, batch.targets, batch.lengths, strict=True):
            transfer_id = self._engine.transfer_submit_write(address, source, target, length)
            if transfer_id == NOT_SUBMITTED:
                break
            submitted.append(transfer_id)
        if not submitted:
            return "nothing was submitted", True
        deadline = time.monotonic() + self._timeout_s + batch.num_bytes / SLOWEST_BYTES_PER_S
        num_done = 0
        for transfer_id in submitted:
            status = self._await_end(transfer_id, deadline)
            if status == PENDING:
                return f"{len(batch) - num_done} of {len(batch)} pieces not done in time", False
            num_done += status == SUCCEEDED
        return (None if num_done == len(batch) else f"{len(batch) - num_done} of {len(batch)} pieces failed"), False

    def _await_end(self, transfer_id: int, deadline: float) -> int:
        """The final status, or PENDING once the deadline has passed."""
        pause_s = FIRST_PAUSE_S
        while (status := self._engine.transfer_check_status(transfer_id)) == PENDING:
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)  # the engine offers nothing to wait on
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return status

    def _reach(self, address: str) -> None:
        """Before the first write to a peer, and after a failed one: is it there? If not, nothing needs to be sent to
        find out, and the engine's second of patience is spared. Raises PeerLost."""
        if address not in self._reached or address in self._doubtful:
            self.connect(address)
            self._doubtful.discard(address)

    def _explain(self, address: str, batch: Batch, reason: str) -> StagemeshError:
        self._doubtful.add(address)
        try:
            self.connect(address)
        except PeerLost as error:
            return error
        return Retryable(f"writing {batch.num_bytes} bytes in {len(batch)} pieces to {address} failed: {reason}")

    def is_gone(self, address: str) -> bool:
        """True if nobody listens there any more. One that is stopped, or slow, is still there."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), self._connect_timeout_s).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """No batch is being sent any more."""

    def connect(self, address: str) -> None:
        """Raises PeerLost if nothing accepts connections at `address`.

        The engine's own probe is no use: it waits a minute for a process that is stopped.
        """
        host, _, port = address.rpartition(":")
        connect(host, int(port), self._connect_timeout_s)
