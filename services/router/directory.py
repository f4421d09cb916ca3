"""The router's view of the directory, and its sessions with the heads in it.

broker --snapshot, changes--> directory --joined--> session     --gone--> its requests run on elsewhere
While the broker is away, and until one that has just started knows who is there, the last view stays: instances that
answer go on being used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from stagemesh.services.router.last_stages import LastStages
from stagemesh.services.router.placement import Placement, Sent, place
from stagemesh.services.router.prefixes import PrefixIndex
from stagemesh.services.router.session import HeadSession
from stagemesh.shared.codec.mesh import instance_from_pb, ref_from_pb
from stagemesh.shared.core.directory import InstanceInfo, Role
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.errors import Retryable, StagemeshError
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.runtime.backoff import delays

MakeSession = Callable[[InstanceInfo, Callable[[], None]], HeadSession]


class MeshView:
    """Only this router's copy: the broker owns the directory."""

    def __init__(
        self,
        broker: Client,
        router: str,
        make_session: MakeSession,
        log: Log,
        prefixes: PrefixIndex | None = None,
        dial: Dial = PLAIN,
    ) -> None:
        self._broker, self._router, self._make_session, self._log = broker, router, make_session, log
        self._prefixes = PrefixIndex() if prefixes is None else prefixes
        self._instances: dict[str, InstanceInfo] = {}
        self._sessions: dict[InstanceRef, HeadSession] = {}
        self._last_stages = LastStages(dial)
        self._sent: dict[str, Sent] = {}  # to an instance, by name, since its last report
        self.changed = asyncio.Event()

    def __iter__(self) -> Iterator[InstanceInfo]:
        """Instances that can be talked to now."""
        return (info for info in self._instances.values() if self._session_up(info.ref))

    def session(self, ref: InstanceRef) -> HeadSession:
        """Raises Retryable if it has gone meanwhile."""
        if not self._session_up(ref):
            raise Retryable(f"{ref} has just gone")
        return self._sessions[ref]

    def place(self, token_ids: Sequence[int], max_tokens: int, avoid: Collection[InstanceRef] = ()) -> Placement:
        """A pair of instances for a request, as `placement.place` chooses it. Raises Retryable if there is none now."""
        instances = list(self)
        prefills = [info for info in instances if info.role is Role.PREFILL]
        cached = {info.ref.name: self._prefixes.cached_tokens(info, token_ids) for info in prefills}
        return place(
            instances,
            prompt_tokens=len(token_ids),
            max_tokens=max_tokens,
            sent=self._sent,
            cached=cached,
            avoid=avoid,
        )

    async def prepare(self, instances: Iterable[InstanceInfo], structure: Structure) -> None:
        """Before a request with `structure` goes there. Raises Rejected if it is none; Exhausted; Retryable;
        StageLost, which says with whom."""
        await self._last_stages.keep(self._instances.values())
        await self._last_stages.prepare(instances, structure)

    async def close(self) -> None:
        await self._last_stages.close()

    def note_sent(self, ref: InstanceRef, token_ids: Sequence[int]) -> None:
        """A request goes there; `token_ids` is the prompt that it has to compute, empty for a decode instance."""
        info, before = self._instances.get(ref.name), self._sent.get(ref.name, Sent())
        tokens = 0
        if info is not None and info.ref == ref and token_ids:
            tokens = len(token_ids) - self._prefixes.cached_tokens(info, token_ids)
            self._prefixes.note(info, token_ids)
        self._sent[ref.name] = Sent(before.requests + 1, before.tokens + tokens)

    def peers(self) -> dict[str, str]:
        return {f"{i.ref.name}/{s.pp_rank}": s.address for i in self._instances.values() for s in i.stages}

    def describe(self, now_s: float) -> Iterator[Entry]:
        """The sessions with heads. `now_s` is CLOCK_MONOTONIC."""
        return (session.describe(now_s) for session in self._sessions.values())

    def _session_up(self, ref: InstanceRef) -> bool:
        session = self._sessions.get(ref)
        return session is not None and session.up

    async def run(self) -> None:
        """A child of the router: runs until cancelled."""
        for delay_s in delays():
            try:
                request = broker_pb2.WatchRequest(router=self._router)
                async for update in self._broker.receive("Watch", request):
                    self._take(update)
            except StagemeshError as error:
                self._log.debug("the broker is away", error=str(error))
            await asyncio.sleep(delay_s)

    def _take(self, update: broker_pb2.DirectoryUpdate) -> None:
        changed = [instance_from_pb(message) for message in update.changed]
        gone = [ref_from_pb(message) for message in update.removed]
        if update.snapshot and not update.gathering:
            present = {info.ref for info in changed}
            gone += [info.ref for info in self._instances.values() if info.ref not in present]
        for ref in gone:
            self._remove(ref)
        for info in changed:
            known = self._instances.get(info.ref.name)
            if known is not None and known.ref != info.ref:
                self._remove(known.ref)
            self._instances[info.ref.name] = info
            self._sent.pop(info.ref.name, None)
            session = self._sessions.get(info.ref)
            if session is None or session.ended:
                self._sessions[info.ref] = self._make_session(info, self.changed.set)
        self.changed.set()

    def _remove(self, ref: InstanceRef) -> None:
        known = self._instances.get(ref.name)
        if known is not None and known.ref == ref:
            del self._instances[ref.name]
            self._sent.pop(ref.name, None)
        self._prefixes.forget(ref)
        session = self._sessions.pop(ref, None)
        if session is not None:
            session.close()
