"""The peers that a NIXL agent has met: their metadata, once a region, and whether their connection has broken.

unknown --reach, add--> met <--> busy with batches --disconnected--> broken --when idle--> forgotten

A broken peer is met afresh by the next write, or found not to be there. One that was restarted has another name, so
nothing of the old one is used for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from stagemesh.shared.errors import PeerLost, ProtocolViolation
from stagemesh.shared.transfer.nixl_agent import Agent, NixlKey
from stagemesh.shared.transfer.reach import connect

AGAIN_AFTER_S: Final = 1.0  # between attempts at a peer that is not there
MAX_PEERS: Final = 1024  # above that, those met first are forgotten: a dead peer that nobody writes to costs about 2 KB


@dataclass(slots=True)
class Peer:
    """What the agent knows of a peer: the regions whose metadata it has, and the batches on their way."""

    loaded: set[bytes] = field(default_factory=set)
    num_active: int = 0
    broken: bool = False


class Peers:
    """Used by all worker threads at once. `calling` guards the agent, `_lock` what is remembered here."""

    def __init__(self, agent: Agent, own_name: str, calling: threading.Lock, *, connect_timeout_s: float) -> None:
        self._agent, self._own_name, self._calling = agent, own_name, calling
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._met: dict[str, Peer] = {}
        self._refused: dict[str, float] = {}  # when a peer was last found not to be there

    @contextmanager
    def meet(self, key: NixlKey) -> Iterator[Peer]:
        """The peer, known to the agent and kept there for the duration. Raises PeerLost if nobody is there."""
        if key.name != self._own_name and key.port and self._is_new(key.name):
            self._reach(key)
        with self._lock:
            peer = self._met.get(key.name)
            if peer is not None and peer.broken:
                if peer.num_active:
                    raise PeerLost(f"the connection to {key.name} has just broken")
                self._forget(key.name)
                peer = None
            if peer is None:
                self._check_refused(key.name)
                self._make_room()
                peer = self._met[key.name] = Peer()
            if key.metadata not in peer.loaded and key.name != self._own_name:
                self._load(key, peer)
            peer.num_active += 1
        try:
            yield peer
        finally:
            with self._lock:
                peer.num_active -= 1

    def _is_new(self, name: str) -> bool:
        with self._lock:
            peer = self._met.get(name)
            return peer is None or (peer.broken and not peer.num_active)

    def _reach(self, key: NixlKey) -> None:
        """Whether it is there is asked before UCX is: its attempt at a peer that is not there costs a socket, which it
        keeps until its end."""
        with self._lock:
            self._check_refused(key.name)
        try:
            connect(key.host, key.port, self._connect_timeout_s)
        except PeerLost:
            with self._lock:
                self._refuse(key.name)
            raise

    def _refuse(self, name: str) -> None:
        self._refused[name] = time.monotonic()
        if name in self._met and not self._met[name].num_active:
            self._forget(name)

    def _check_refused(self, name: str) -> None:
        now = time.monotonic()
        self._refused = {known: at for known, at in self._refused.items() if now < at + AGAIN_AFTER_S}
        if name in self._refused:
            raise PeerLost(f"transfer endpoint {name} could not be reached just now")

    def _load(self, key: NixlKey, peer: Peer) -> None:
        try:
            with self._calling:
                said = self._agent.add_remote_agent(key.metadata)
        except Exception as error:
            self._refuse(key.name)
            raise PeerLost(f"transfer endpoint {key.name} cannot be reached: {error!r}") from error
        if (said.decode() if isinstance(said, bytes) else said) != key.name:
            raise ProtocolViolation(f"metadata of {said!r}, not of {key.name}")
        peer.loaded.add(key.metadata)

    def _make_room(self) -> None:
        idle = [name for name, peer in self._met.items() if not peer.num_active]
        for name in idle[: max(0, len(self._met) + 1 - MAX_PEERS)]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._met[name]
        with self._calling, suppress(Exception):  # it may never have been known
            self._agent.remove_remote_agent(name)
