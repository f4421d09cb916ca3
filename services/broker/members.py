"""Who is there: instances, by the streams of their heads, and the routers that watch.

a head's Join stream is its presence: when it ends without a word, or is silent for LOST_AFTER_S, the instance is lost
a router whose stream has broken watches again within moments; one that does not is gone
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from stagemesh.services.broker.describe import ReportTimes, describe_instance
from stagemesh.services.broker.directory import Directory, flaw
from stagemesh.services.broker.heads import Heads
from stagemesh.services.broker.watchers import Updates, Watchers
from stagemesh.shared.codec.mesh import instance_from_pb
from stagemesh.shared.core.directory import InstanceInfo, Role
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import ProtocolViolation, Rejected, Retryable
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.runtime.tasks import Tasks

LOST_AFTER_S = 2.0
ROUTER_GONE_AFTER_S = 5.0
LEFT = "it has left"


class Members:
    """Owns the directory and the connections to the heads in it. `on_lost` hears of instances that have gone, in
    whatever way, `on_router_gone` of routers."""

    def __init__(
        self,
        tasks: Tasks,
        log: Log,
        *,
        on_lost: Callable[[InstanceRef], None],
        on_router_gone: Callable[[str], None],
        dial: Dial = PLAIN,
    ) -> None:
        self._tasks, self._log = tasks, log
        self._on_lost, self._on_router_gone = on_lost, on_router_gone
        self._directory, self.heads = Directory(), Heads(dial)
        self._watchers = Watchers(self._directory)
        self._reports: dict[InstanceRef, ReportTimes] = {}
        self._routers: Counter[str] = Counter()  # streams of each that watches

    def __iter__(self) -> Iterator[InstanceInfo]:
        return iter(self._directory)

    def get(self, ref: InstanceRef) -> InstanceInfo | None:
        return self._directory.get(ref)

    def of_role(self, ref: InstanceRef, role: Role) -> InstanceInfo:
        """Raises Retryable if it is not there, Rejected if it is of the other role."""
        info = self._directory.get(ref)
        if info is None:
            raise Retryable(f"{ref} is not there (any more)")
        if info.role is not role:
            raise Rejected("instance", f"{ref} is a {info.role.value} instance, not {role.value}")
        return info

    async def join(self, reports: AsyncIterator[broker_pb2.InstanceReport], context: Any) -> None:
        """A head's stream, to its end."""
        ref: InstanceRef | None = None
        leaving, why = False, "its stream has broken"
        updates = self._watchers.add()
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(_send(updates, context))
                while not isinstance(report := await _next_report(reports), Silence | None):
                    info = instance_from_pb(report.info)
                    ref, leaving = info.ref, report.leaving
                    self._report(info)
                why = "it is silent" if isinstance(report, Silence) else "its stream has ended"
                sender.cancel()
        finally:
            self._watchers.remove(updates)
            if ref is not None:
                self._tasks.spawn(self._gone(ref, why=LEFT if leaving else why))

    async def watch(self, router: str) -> AsyncIterator[broker_pb2.DirectoryUpdate]:
        """A router's stream, to its end."""
        updates = self._watchers.add()
        self._routers[router] += 1
        try:
            while (update := await updates.get()) is not None:
                yield update
        finally:
            self._watchers.remove(updates)
            self._routers[router] -= 1
            self._tasks.spawn(self._router_gone(router))

    async def _router_gone(self, router: str) -> None:
        await asyncio.sleep(ROUTER_GONE_AFTER_S)
        if not self._routers[router]:
            del self._routers[router]
            self._on_router_gone(router)

    def _report(self, info: InstanceInfo) -> None:
        if (problem := flaw(info)) is not None:
            raise ProtocolViolation(f"a report of {info.ref.name!r}: {problem}")
        known = self._directory.get(info.ref)
        change = self._directory.report(info)
        if change is None:
            raise ProtocolViolation(f"{info.ref} has been replaced by a later epoch")
        if known is None:
            self.heads.add(info)
            self._log.info("an instance has joined", instance_name=info.ref.name, instance_epoch=info.ref.epoch)
        now_s = time.monotonic()
        self._reports.setdefault(info.ref, ReportTimes(now_s, now_s)).last_s = now_s
        self._watchers.tell(change)
        for replaced in change.removed:
            self._lose(replaced)

    async def _gone(self, ref: InstanceRef, *, why: str) -> None:
        change = self._directory.remove(ref)
        if change is None:
            return
        said = self._log.info if why == LEFT else self._log.warning
        said("an instance is gone", instance_name=ref.name, instance_epoch=ref.epoch, reason=why)
        self._watchers.tell(change)
        self._lose(ref)
        await self.heads.remove(ref)

    def _lose(self, ref: InstanceRef) -> None:
        self._reports.pop(ref, None)
        self._on_lost(ref)

    # -- views --

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def by_role(self) -> Mapping[str, int]:
        roles = Counter(info.role for info in self._directory)
        return {role.value: roles[role] for role in Role}

    def describe(self, now_s: float) -> Iterator[Entry]:
        return (describe_instance(info, self._reports[info.ref], now_s) for info in self._directory)


class Silence:
    """Nothing has come for LOST_AFTER_S."""


async def _next_report(
    reports: AsyncIterator[broker_pb2.InstanceReport],
) -> broker_pb2.InstanceReport | Silence | None:
    """None at the end of the stream."""
    try:
        async with asyncio.timeout(LOST_AFTER_S):
            return await anext(reports, None)
    except TimeoutError:
        return Silence()


async def _send(updates: Updates, context: Any) -> None:
    while (update := await updates.get()) is not None:
        await context.write(update)
