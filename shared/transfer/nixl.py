"""NIXL as an Endpoint, over UCX: host memory, or memory of one GPU. Inside of one host by copies between processes
(CUDA IPC for GPUs), else over TCP. The only module that knows it.

open: environment -> agent (with its progress thread)
publish: the region's metadata and the agent's addresses, about half a KB, travel inside of the key
write: pieces -> batches -> a worker thread of the lane posts and polls one batch after the other -> the loop is told
close: cancel, wait for what runs, stop the threads, end the registrations, drop the agent
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from stagemesh.shared.errors import Rejected, Retryable, StagemeshError
from stagemesh.shared.transfer.base import Lane, Piece, Region, RegionKey
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.capabilities import is_loopback
from stagemesh.shared.transfer.handle import Transfer
from stagemesh.shared.transfer.listeners import listeners_since, listening_inodes
from stagemesh.shared.transfer.nixl_agent import Agent, NixlKey, Place, parse_key
from stagemesh.shared.transfer.nixl_sender import NixlSender
from stagemesh.shared.transfer.regions import RegionTable
from stagemesh.shared.transfer.sockets import until_read
from stagemesh.shared.transfer.writes import Failure, Writes

BACKEND: Final = "UCX"
# by device and protocol. What shared memory segments would add is their leftovers after a kill. TCP is always there: it
# also makes the connections, and notices when a peer dies.
COPIES: Final = "self,tcp,cma"
CUDA_IPC: Final = "self,tcp,cma,cuda_copy,cuda_ipc"
TRANSPORTS: Final = {
    "cpu": {"auto": COPIES, "intranode": COPIES, "tcp": "self,tcp"},
    "cuda": {"auto": CUDA_IPC, "intranode": CUDA_IPC, "tcp": "self,tcp,cuda_copy"},
}


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """`device` is where this endpoint's memory is: `cpu`, or `cuda`, the current GPU. A loopback `host` confines the
    agent to the loopback interface; otherwise it offers every interface of the host, or those that UCX_NET_DEVICES
    names.

    A batch is what is posted at once: its bytes bound how long an abort, and an urgent write, have to wait: while one
    thread copies, no other can post. `num_bulk_threads` is also the number of bulk batches under way.
    """

    host: str = "127.0.0.1"
    device: str = "cpu"
    protocol: str = "auto"
    max_batch_bytes: int = 4 << 20
    max_batch_pieces: int = 256
    num_bulk_threads: int = 2
    max_open_writes: int = 4096
    timeout_s: float = 10.0
    connect_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        known = TRANSPORTS[self.device]
        if self.protocol not in known:
            reason = f"'nixl' on {self.device!r} does not know {self.protocol!r}, only {', '.join(known)}"
            raise Rejected("transfer.protocol", reason)
        if min(self.max_batch_bytes, self.max_batch_pieces, self.num_bulk_threads) < 1:
            raise Rejected("max_batch_bytes, max_batch_pieces, num_bulk_threads", "must be at least 1")

    def environment(self) -> dict[str, str]:
        """The library reads these when it is loaded and when an agent is made."""
        return {
            "UCX_TLS": TRANSPORTS[self.device][self.protocol],
            "UCX_MEMTYPE_CACHE": "n",  # it takes memory for the host's that a GPU's allocator had before UCX was loaded
            **({"UCX_NET_DEVICES": "lo"} if is_loopback(self.host) else {}),
            "UCX_LOG_LEVEL": "FATAL",  # it writes to standard output, and what it says is reported as the write's error
            "NIXL_LOG_LEVEL": "FATAL",
        }


def create_agent(name: str, settings: NixlSettings) -> Agent:
    """Raises StagemeshError if the library cannot be loaded or does not start."""
    os.environ.update(settings.environment())
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise StagemeshError(
            f"NIXL cannot be loaded ({error}). It needs the Python packages nixl and nixl-cu12 (nixl-cu13 with a torch "
            "for CUDA 13), the extra [nixl]"
        ) from error
    sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # off by default, and several threads post here
    try:
        agent: Agent = nixl_agent(name, nixl_agent_config(backends=[BACKEND], sync_mode=sync))
    except Exception as error:
        raise StagemeshError(f"NIXL does not start on {settings.host}: {error!r}") from error
    return agent


def listening_port(host: str, listeners: list[socket.socket]) -> int:
    """At which of `listeners`, which it closes, this process is reached under `host`; 0 if at none."""
    addresses = {"0.0.0.0", "::", *(str(found[4][0]) for found in socket.getaddrinfo(host, None))}
    ports = [listener.getsockname()[1] for listener in listeners if listener.getsockname()[0] in addresses]
    for listener in listeners:
        listener.close()
    return ports[0] if ports else 0


class NixlEndpoint:
    """An Endpoint. The library's environment is the process's: use one host, device and protocol in a process.

    `name` is that of the agent. Peers get it, with what they need to connect, inside of the keys.
    """

    def __init__(self, settings: NixlSettings | None = None) -> None:
        self._settings = settings or NixlSettings()
        self._place = Place("VRAM", torch.cuda.current_device()) if self._settings.device == "cuda" else Place()
        self.name = f"{self._settings.host}#{secrets.token_hex(8)}"
        before = listening_inodes()
        agent = create_agent(self.name, self._settings)
        self._port = listening_port(self._settings.host, listeners_since(before))
        self._agent: Agent | None = agent
        self._regions = RegionTable()
        self._registered: dict[Region, Any] = {}
        self._kept: list[torch.Tensor] = []  # unregistered after a write in doubt: theirs may be the memory it reads
        self._sender: NixlSender | None = NixlSender(
            agent,
            self.name,
            timeout_s=self._settings.timeout_s,
            connect_timeout_s=self._settings.connect_timeout_s,
            place=self._place,
        )
        # UCX copies with the thread's CUDA context, which a new thread has not
        prepare = partial(torch.cuda.set_device, self._place.device) if self._settings.device == "cuda" else None
        self._writes = Writes(self._send, self._settings, prepare)

    def register(self, memory: torch.Tensor) -> Region:
        if (memory.device.type, memory.device.index or 0) != (self._settings.device, self._place.device):
            raise Rejected("memory", f"must be on {self._settings.device}:{self._place.device}, is on {memory.device}")
        region = self._regions.bounds(memory)
        agent, place = self._running(), self._place
        if memory.is_cuda:
            torch.cuda.synchronize()  # what it is filled with is there; and this thread has a context, which it needs
        try:
            described = [(region.address, region.length, place.device, "")]
            self._registered[region] = agent.register_memory(described, place.memory)
        except Exception as error:
            raise Retryable(f"NIXL did not register {region}: {error!r}") from error
        self._regions.add(region, memory)
        return region

    def unregister(self, region: Region) -> None:
        memory = self._regions.remove(region)
        if self._agent is None or memory is None:
            return
        if self._writes.num_unproven:
            self._kept.append(memory)
        self._agent.deregister_memory(self._registered.pop(region))

    def publish(self, region: Region) -> RegionKey:
        key = self._regions.key(self.name, region)
        metadata = self._running().get_partial_agent_metadata(self._registered[region], True, [BACKEND])
        return RegionKey(str(NixlKey(self.name, self._port, self._place, metadata)), key.address, key.length)

    def write(self, key: RegionKey, pieces: Sequence[Piece], lane: Lane = Lane.BULK) -> Transfer:
        self._running()
        parse_key(key.endpoint)
        return self._writes.start(key, pieces, lane, self._regions.regions)

    async def read_out(self) -> None:
        await until_read()  # all: UCX sends to a peer over the connection that this one has made, if there is one

    async def close(self) -> None:
        agent, self._agent = self._agent, None
        await self._writes.end()
        if agent is None:
            return
        for registered in self._registered.values():
            agent.deregister_memory(registered)
        self._registered.clear()
        self._sender = None
        del agent  # ends its thread, and what is left of unproven writes: only now may memory go
        self._regions = RegionTable()
        self._kept.clear()

    def _running(self) -> Agent:
        if self._agent is None:
            raise Retryable(f"endpoint {self.name} is closed")
        return self._agent

    def _send(self, endpoint: str, batch: Batch, lane: Lane) -> Failure | None:
        assert self._sender is not None, "the workers stop first"
        return self._sender.send(endpoint, batch, lane)
