"""Batches from GPU to GPU of one host, and the mappings of peers' memory that they go through.

first write to a peer --> its memory is opened here too --> engine maps it --> copies
peer's process is gone --> both mappings are closed: else its GPU memory stays taken for as long as this process lives

The engine copies on the default stream and says done once the copies are enqueued; so here a batch is done when that
stream is through. Nothing of it is in flight then, whether it went well or not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from stagemesh.shared.errors import PeerLost, StagemeshError
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.sender import Engine, Sender

LOOK_EVERY_S: Final = 1.0


class Mapper(Protocol):
    """Opens memory of another process by its handle. Opened again, it is the same mapping, to be closed once more."""

    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...


class CudaMapper:
    """By CUDA IPC, on the current device."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime: Any = runtime

    def open(self, handle: bytes) -> int:
        runtime = self._runtime
        wanted = runtime.cudaIpcMemHandle_t()
        wanted.reserved = handle
        code, address = runtime.cudaIpcOpenMemHandle(wanted, runtime.cudaIpcMemLazyEnablePeerAccess)
        if int(code) != 0:
            raise PeerLost(f"the peer's GPU memory cannot be opened: {code!r}")
        return int(address)

    def close(self, address: int) -> None:
        (code,) = self._runtime.cudaIpcCloseMemHandle(address)
        if int(code) != 0:
            raise StagemeshError(f"the peer's GPU memory cannot be closed: {code!r}")


def handle_of(memory: torch.Tensor) -> bytes:
    """By which another process opens the allocation that `memory` begins."""
    from cuda.bindings import runtime

    code, handle = runtime.cudaIpcGetMemHandle(memory.data_ptr())
    if int(code) != 0:
        raise StagemeshError(f"GPU memory has no handle for other processes: {code!r}")
    return bytes(handle.reserved)


@dataclass(slots=True)
class Mapped:
    """`address` is where it lies here. `users`: batches that are being copied to it."""

    address: int
    users: int = 0
    gone: bool = False


class Mappings:
    """By the peers' addresses; used by all worker threads at once."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._lock = threading.Lock()
        self._mapped: dict[str, Mapped] = {}

    @property
    def known(self) -> list[str]:
        with self._lock:
            return [address for address, mapped in self._mapped.items() if not mapped.gone]

    @property
    def num_open(self) -> int:
        return len(self.known)

    @contextmanager
    def used(self, address: str, handle: bytes) -> Iterator[None]:
        """The mapping stays meanwhile. Raises PeerLost where the peer is gone."""
        with self._lock:
            if address not in self._mapped:
                self._mapped[address] = Mapped(self._mapper.open(handle))
            mapped = self._mapped[address]
            if mapped.gone:
                raise PeerLost(f"the process at {address} is gone")
            mapped.users += 1
        try:
            yield
        finally:
            with self._lock:
                mapped.users -= 1

    def drop(self, address: str) -> bool:
        """Closes what is mapped of a peer that is gone, for good; False while a batch is being copied to it."""
        with self._lock:
            mapped = self._mapped[address]
            if mapped.users:
                return False
            mapped.gone = True
            self._mapper.close(mapped.address)
            with suppress(StagemeshError):  # the engine's, which it would keep to its end; or it never had one
                self._mapper.close(mapped.address)
            return True

    def close(self) -> None:
        """Closes what was opened here; the engine closes its own."""
        with self._lock:
            for mapped in self._mapped.values():
                if not mapped.gone:
                    mapped.gone = True
                    self._mapper.close(mapped.address)


class IntranodeSender(Sender):
    """A peer's name tells its memory's handle. A thread looks now and then whether the peers' processes are there."""

    def __init__(self, engine: Engine, mappings: Mappings, *, timeout_s: float, connect_timeout_s: float) -> None:
        super().__init__(engine, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        self._mappings = mappings
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="transfer-peers", daemon=True)
        self._thread.start()

    def _send_bulk(self, address: str, incarnation: str, batch: Batch) -> tuple[str | None, bool]:
        handle = bytes.fromhex(incarnation.partition("#")[2])
        with self._mappings.used(address, handle):
            code = self._engine.batch_transfer_sync_write(address, batch.sources, batch.targets, batch.lengths)
            torch.cuda.default_stream().synchronize()
        return (None if code == 0 else f"code {code}"), True

    def _look(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            for address in self._mappings.known:
                if self.is_gone(address):
                    self._mappings.drop(address)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._mappings.close()
