"""How one batch is written by NIXL, on a worker thread, and what is known when that has ended.

meet the peer --> prepare --> post --> poll until done | disconnected | out of time

A post either copies at once (the peer's memory in the same host) or starts what the library's own thread carries on.
A batch that ended well has been flushed: the target has applied its last byte. One that failed after its post may have
bytes in a socket that the target still reads, so only what was never posted counts as proven to be over.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Final

from stagemesh.shared.errors import PeerLost, ProtocolViolation, Retryable
from stagemesh.shared.transfer.base import Lane
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.nixl_agent import Agent, Place, parse_key
from stagemesh.shared.transfer.nixl_peers import Peer, Peers
from stagemesh.shared.transfer.writes import Failure

PENDING, DONE = "PROC", "DONE"
DISCONNECTED: Final = "nixlRemoteDisconnectError"  # the library's classes are not the same in all its builds
SPIN_S: Final = 100e-6  # of an urgent write, and of any from a GPU: they seldom take longer
FIRST_PAUSE_S: Final = 50e-6
LONGEST_PAUSE_S: Final = 1e-3
SLOWEST_BYTES_PER_S: Final = 16 << 20  # on top of the timeout: a link slower than this counts as broken


class NixlSender:
    """Used by all worker threads at once. One call of the agent is served at a time: it does so too, but some of its
    calls wait with the interpreter held, and the event loop with them (measured: for as long as another thread's post
    copies). `place` is where this side's memory is."""

    def __init__(
        self, agent: Agent, own_name: str, *, timeout_s: float, connect_timeout_s: float, place: Place
    ) -> None:
        self._agent, self._timeout_s, self._place = agent, timeout_s, place
        self._calling = threading.Lock()
        self._peers = Peers(agent, own_name, self._calling, connect_timeout_s=connect_timeout_s)

    def send(self, endpoint: str, batch: Batch, lane: Lane) -> Failure | None:
        """None once the whole batch is applied at the target. Does not raise."""
        try:
            key = parse_key(endpoint)
            with self._peers.meet(key) as peer:
                return self._write(key.name, key.place, peer, batch, lane)
        except (PeerLost, ProtocolViolation) as error:
            return Failure(error, proven=True)

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
