"""The Mooncake transfer engine as an Endpoint, over TCP, RDMA, or from GPU to GPU of one host. The only module that
knows it.

open: environment -> engine -> listeners confined to loopback
write: pieces -> batches -> a worker thread of the lane sends one batch after the other -> the loop is told
close: cancel, wait for what runs, stop the threads, end the registrations, drop the engine

A peer's name carries a number drawn at its start: the engine keeps what it learnt of a peer for good, so one that
comes back on an old port must be told from the one that was there.
"""

from __future__ import annotations

import io
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import torch

from stagemesh.shared.errors import ProtocolViolation, Rejected, Retryable, StagemeshError
from stagemesh.shared.transfer.base import Lane, Piece, Region, RegionKey
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.capabilities import is_loopback
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.intranode import CudaMapper, IntranodeSender, Mappings, handle_of
from stagemesh.shared.transfer.listeners import confine_to_loopback, listeners_since, listening_inodes
from stagemesh.shared.transfer.regions import RegionTable
from stagemesh.shared.transfer.sender import Engine, Sender
from stagemesh.shared.transfer.sockets import until_read
from stagemesh.shared.transfer.writes import Failure, Writes

DEBIAN_PACKAGES: Final = ("libibverbs1", "librdmacm1", "libnuma1")
MIN_TIMEOUT_S: Final = 5  # the engine takes less as this
ENGINE_QUEUE: Final = 1024  # pieces it queues a peer before it turns some away


TRANSPORT: Final = {  # it looks at the hardware, whatever it is asked for, unless told otherwise
    "tcp": {"MC_FORCE_TCP": "1"},
    "intranode": {"MC_INTRANODE_NVLINK": "1"},
    "rdma": {},
}


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """`host` is what peers connect to. A loopback host confines the engine's listeners to loopback.

    A batch is what is given to the engine at once: its bytes bound how long an abort has to wait, its pieces how much
    the engine has to queue. `num_bulk_threads` is also the number of bulk batches under way.
    """

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    max_batch_bytes: int = 16 << 20
    max_batch_pieces: int = 256
    num_bulk_threads: int = 2
    max_open_writes: int = 4096
    timeout_s: int = 10
    connect_timeout_s: float = 2.0
    min_port: int = 10_000
    private_network: bool = False  # somebody else keeps other hosts away from the ports
    max_port: int = 32_000  # below the range that Linux gives to outgoing connections

    def __post_init__(self) -> None:
        if self.timeout_s < MIN_TIMEOUT_S:
            raise Rejected("timeout_s", f"must be at least {MIN_TIMEOUT_S}, got {self.timeout_s}")
        if min(self.max_batch_bytes, self.max_batch_pieces, self.num_bulk_threads) < 1:
            raise Rejected("max_batch_bytes, max_batch_pieces, num_bulk_threads", "must be at least 1")
        if self.max_batch_pieces * (self.num_bulk_threads + 1) > ENGINE_QUEUE:
            raise Rejected("max_batch_pieces", f"times (num_bulk_threads + 1) must be at most {ENGINE_QUEUE}")

    def environment(self) -> dict[str, str]:
        """The engine reads these when it is created, and some of them later."""
        return {
            **TRANSPORT[self.protocol],
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else every piece opens a connection
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(ENGINE_QUEUE),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(self.timeout_s),
            "MC_TRANSFER_TIMEOUT": str(self.timeout_s),
            "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, round(self.connect_timeout_s))),
            "MC_MIN_RPC_PORT": str(self.min_port),
            "MC_MAX_RPC_PORT": str(self.max_port),
            "MC_LOG_LEVEL": "ERROR",
        }


def create_engine(settings: MooncakeSettings) -> Engine:
    """The engine, listening. Raises StagemeshError if the library cannot be loaded or does not start."""
    os.environ.update(settings.environment())
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        packages = " ".join(DEBIAN_PACKAGES)
        raise StagemeshError(
            f"the Mooncake transfer engine cannot be loaded ({error}). It needs the Python package "
            f"mooncake-transfer-engine-non-cuda (or -cuda13) and Debian's {packages}"
        ) from error
    with captured_stderr() as said:  # it reports an error at every start that is none
        engine: Engine = TransferEngine()
        code = engine.initialize(settings.host, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        reason = said.getvalue().decode(errors="replace").strip()
        raise StagemeshError(f"the Mooncake transfer engine does not start on {settings.host} (code {code}): {reason}")
    return engine


@contextmanager
def captured_stderr() -> Iterator[io.BytesIO]:
    """What is written to file descriptor 2 meanwhile, by libraries too, is in the buffer at the end."""
    buffer, kept = io.BytesIO(), os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield buffer
            finally:
                os.dup2(kept, 2)
                file.seek(0)
                buffer.write(file.read())
    finally:
        os.close(kept)


class MooncakeEndpoint:
    """An Endpoint. One in a process: the engine's environment is the process's."""

    def __init__(self, settings: MooncakeSettings | None = None) -> None:
        self._settings = settings or MooncakeSettings()
        before = listening_inodes()
        engine = create_engine(self._settings)
        self._listeners = listeners_since(before)
        self._ports = frozenset(listener.getsockname()[1] for listener in self._listeners)
        if is_loopback(self._settings.host):
            self._confine()
        self._engine: Engine | None = engine
        self._port = engine.get_rpc_port()
        self.name = f"{self._settings.host}:{self._port}#{secrets.token_hex(4)}"
        self._regions = RegionTable()
        self._kept: list[torch.Tensor] = []  # unregistered after a write in doubt: theirs may be the memory it reads
        self._sender: Sender | None = self._make_sender(engine)
        self._writes = Writes(self._send, self._settings)

    def _make_sender(self, engine: Engine) -> Sender:
        timeout_s, connect_timeout_s = self._settings.timeout_s, self._settings.connect_timeout_s
        if self._settings.protocol != "intranode":
            return Sender(engine, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        mappings = Mappings(CudaMapper())
        return IntranodeSender(engine, mappings, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)

    def _confine(self) -> None:
        """Raises Rejected where it is not allowed, and nobody has said that it is done by other means."""
        try:
            confine_to_loopback(self._listeners)
        except Rejected:
            if not self._settings.private_network:
                for listener in self._listeners:
                    listener.close()
                raise

    def register(self, memory: torch.Tensor) -> Region:
        region = self._regions.bounds(memory)
        if memory.is_cuda:
            torch.cuda.synchronize()  # what it is filled with is there; and this thread has a context, which it needs
        if (code := self._running().register_memory(region.address, region.length)) != 0:
            raise Retryable(f"the transfer engine did not register {region} (code {code})")
        self._regions.add(region, memory)
        return region

    def unregister(self, region: Region) -> None:
        memory = self._regions.remove(region)
        if self._engine is None or memory is None:
            return
        self._engine.unregister_memory(region.address)
        if self._writes.num_unproven:
            self._kept.append(memory)

    def publish(self, region: Region) -> RegionKey:
        if self._settings.protocol != "intranode":
            return self._regions.key(self.name, region)
        handle = handle_of(self._regions.memory(region))
        return self._regions.key(f"{self.name}#{handle.hex()}", region)

    def write(self, key: RegionKey, pieces: Sequence[Piece], lane: Lane = Lane.BULK) -> Transfer:
        self._running()
        split_name(key.endpoint)
        return self._writes.start(key, pieces, lane, self._regions.regions)

    async def read_out(self) -> None:
        if self._settings.protocol == "rdma":  # the card writes, and the kernel knows nothing of it
            raise Rejected("transfer.protocol", "over 'rdma' nothing shows whether all that was sent has been applied")
        # Its pool keeps connections to peers that have died, for minutes; but only reads, of which there are none here,
        # bring data over connections that it has made.
        await until_read(self._ports or None)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        await self._writes.end()
        if engine is None:
            return
        for region in self._regions.regions:
            engine.unregister_memory(region.address)
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._wake_listeners()
        del engine  # ends its threads, and what is left of unproven writes: only now may memory go
        self._regions = RegionTable()
        self._kept.clear()

    def _running(self) -> Engine:
        if self._engine is None:
            raise Retryable(f"endpoint {self.name} is closed")
        return self._engine

    def _send(self, endpoint: str, batch: Batch, lane: Lane) -> Failure | None:
        assert self._sender is not None, "the workers stop first"
        return self._sender.send(*split_name(endpoint), batch, lane)

    def _wake_listeners(self) -> None:
        """The engine's destructor waits for its handshake thread, which looks up once in a second while it waits for
        a connection. A short wait from now on, and a connection that ends the present one, spare that second."""
        for listener in self._listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 10_000))
            listener.close()
        self._listeners.clear()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), self._settings.connect_timeout_s).close()


def split_name(name: str) -> tuple[str, str]:
    """(address, incarnation) of an endpoint's name; where its memory is mapped, the handle is part of the incarnation,
    after another #. Raises ProtocolViolation."""
    address, _, incarnation = name.partition("#")
    host, _, port = address.rpartition(":")
    if not (host and incarnation and port.isdecimal() and 0 < int(port) < 65536):
        raise ProtocolViolation(f"not a transfer endpoint: {name!r}")
    return address, incarnation
