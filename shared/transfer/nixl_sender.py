"""How one batch is written by NIXL, on a worker thread, and what is known when that has ended.

meet the peer (its metadata, once a region) --> prepare --> post --> poll until done | disconnected | out of time

A post either copies at once (the peer's memory in the same host) or starts what the library's own thread carries on.
A batch that ended well has been flushed: the target has applied its last byte. One that failed after its post may have
bytes in a socket that the target still reads, so only what was never posted counts as proven to be over.

A peer whose connection broke is forgotten as soon as no batch for it runs; the next write then meets it afresh, or
finds nobody there. A peer that was restarted has another name, so nothing of the old one is used for it.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from stagemesh.shared.errors import PeerLost, ProtocolViolation, Retryable
from stagemesh.shared.transfer.base import Lane
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.writes import Failure

PENDING, DONE = "PROC", "DONE"
DISCONNECTED: Final = "nixlRemoteDisconnectError"  # the library's classes are not the same in all its builds
SPIN_S: Final = 100e-6  # of an urgent write, and of any from a GPU: they seldom take longer
FIRST_PAUSE_S: Final = 50e-6
LONGEST_PAUSE_S: Final = 1e-3
AGAIN_AFTER_S: Final = 1.0  # each attempt at a peer that is not there costs a socket, which UCX keeps until its end
SLOWEST_BYTES_PER_S: Final = 16 << 20  # on top of the timeout: a link slower than this counts as broken


class Agent(Protocol):
    """What is used of the library. A descriptor is (address, length, device[, tag]); errors are exceptions."""

    def register_memory(self, descriptors: list[tuple[int, int, int, str]], memory: str) -> Any: ...
    def deregister_memory(self, registered: Any) -> None: ...
    def get_partial_agent_metadata(self, registered: Any, with_connection: bool, backends: list[str]) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, name: str) -> None: ...
    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], memory: str) -> Any: ...
    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory is, in the library's words: DRAM, or VRAM of the process's GPU number `device`."""

    memory: str = "DRAM"
    device: int = 0

    def __str__(self) -> str:
        return f"{self.memory}{self.device}"


@dataclass(slots=True)
class Peer:
    """What the agent knows of a peer: the regions whose metadata it has, and the batches on their way."""

    loaded: set[bytes] = field(default_factory=set)
    num_active: int = 0
    broken: bool = False


def join_key(name: str, place: Place, metadata: bytes) -> str:
    return f"{name}:{place}:{base64.b64encode(metadata).decode()}"


def split_key(endpoint: str) -> tuple[str, Place, bytes]:
    """(name, place, metadata) of a published region. Raises ProtocolViolation."""
    rest, _, encoded = endpoint.rpartition(":")
    name, _, place = rest.rpartition(":")
    memory, device = place[:4], place[4:]
    try:
        metadata = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        metadata = b""
    if not (name and metadata and memory in ("DRAM", "VRAM") and device.isdecimal() and len(device) <= 4):
        raise ProtocolViolation(f"not a NIXL endpoint: {endpoint[:80]!r}")
    return name, Place(memory, int(device)), metadata


class NixlSender:
    """Used by all worker threads at once. `_lock` guards what is remembered of peers; `_calling` serves one call of the
    agent at a time: it does so too, but some of its calls wait with the interpreter held, and the event loop with
    them (measured: for as long as another thread's post copies)."""

    def __init__(self, agent: Agent, own_name: str, *, timeout_s: float, place: Place) -> None:
        self._agent, self._own_name, self._timeout_s, self._place = agent, own_name, timeout_s, place
        self._peers: dict[str, Peer] = {}
        self._refused: dict[str, float] = {}  # when a peer was last found not to be there
        self._lock, self._calling = threading.Lock(), threading.Lock()

    def send(self, endpoint: str, batch: Batch, lane: Lane) -> Failure | None:
        """None once the whole batch is applied at the target. Does not raise."""
        try:
            name, place, metadata = split_key(endpoint)
            with self._met(name, metadata) as peer:
                return self._write(name, place, peer, batch, lane)
        except (PeerLost, ProtocolViolation) as error:
            return Failure(error, proven=True)

    @contextmanager
    def _met(self, name: str, metadata: bytes) -> Iterator[Peer]:
        """Raises PeerLost if nobody is there."""
        with self._lock:
            peer = self._peers.setdefault(name, Peer())
            if peer.broken:
                if peer.num_active:
                    raise PeerLost(f"the connection to {name} has just broken")
                self._forget(name)
                peer = self._peers[name] = Peer()
            if metadata not in peer.loaded and name != self._own_name:
                self._load(name, peer, metadata)
            peer.num_active += 1
        try:
            yield peer
        finally:
            with self._lock:
                peer.num_active -= 1

    def _load(self, name: str, peer: Peer, metadata: bytes) -> None:
        now = time.monotonic()
        self._refused = {known: at for known, at in self._refused.items() if now < at + AGAIN_AFTER_S}
        if name in self._refused:
            if not peer.loaded:
                del self._peers[name]
            raise PeerLost(f"transfer endpoint {name} could not be reached just now")
        try:
            with self._calling:
                said = self._agent.add_remote_agent(metadata)
        except Exception as error:
            self._refused[name] = now
            if not peer.num_active:
                self._forget(name)
            raise PeerLost(f"transfer endpoint {name} cannot be reached: {error!r}") from error
        if (said.decode() if isinstance(said, bytes) else said) != name:
            raise ProtocolViolation(f"metadata of {said!r}, not of {name}")
        peer.loaded.add(metadata)

    def _forget(self, name: str) -> None:
        del self._peers[name]
        with self._calling, suppress(Exception):  # it may never have been known
            self._agent.remove_remote_agent(name)

    def _write(self, name: str, there: Place, peer: Peer, batch: Batch, lane: Lane) -> Failure | None:
        agent, here, handle = self._agent, self._place, None
        try:
            local = [(source, length, here.device) for source, length in zip(batch.sources, batch.lengths, strict=True)]
            remote = [
                (target, length, there.device) for target, length in zip(batch.targets, batch.lengths, strict=True)
            ]
            with self._calling:
                handle = agent.initialize_xfer(
                    "WRITE", agent.get_xfer_descs(local, here.memory), agent.get_xfer_descs(remote, there.memory), name
                )
                state = agent.transfer(handle)
            state = self._await_end(handle, state, batch, lane)
        except Exception as error:  # the library's own, mapped here once
            if type(error).__name__ == DISCONNECTED:
                peer.broken = True
                return Failure(PeerLost(f"the connection to {name} broke"), proven=handle is None)
            return Failure(Retryable(f"{describe(batch, name)} failed: {error!r}"), proven=handle is None)
        finally:
            if handle is not None:
                with self._calling, suppress(Exception):  # one that still runs may refuse; the agent's end releases it
                    agent.release_xfer_handle(handle)
        if state == DONE:
            return None
        reason = "was not done in time" if state == PENDING else f"ended as {state}"
        return Failure(Retryable(f"{describe(batch, name)} {reason}"), proven=False)

    def _await_end(self, handle: Any, state: str, batch: Batch, lane: Lane) -> str:
        """The final state, or PENDING once the time is up."""
        now = time.monotonic()
        deadline = now + self._timeout_s + batch.num_bytes / SLOWEST_BYTES_PER_S
        spin_until = now + SPIN_S if lane is Lane.URGENT or self._place.memory == "VRAM" else now
        pause_s = FIRST_PAUSE_S
        while state == PENDING and (now := time.monotonic()) < deadline:
            if now < spin_until:
                time.sleep(0)
            else:
                time.sleep(pause_s)  # the library offers nothing to wait on
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with self._calling:
                state = self._agent.check_xfer_state(handle)
        return state


def describe(batch: Batch, name: str) -> str:
    return f"writing {batch.num_bytes} bytes in {len(batch)} pieces to {name}"
