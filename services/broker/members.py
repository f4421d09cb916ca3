"""Who is there: instances, by the streams of their heads, and the routers that watch.

a head's Join stream is its presence: when it ends without a word, or is silent for LOST_AFTER_S, the instance is lost
after this broker has stood still itself, heads may come back first, and nobody is lost for that
a router whose stream has broken watches again within moments; one that does not is gone
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from stagemesh.services.broker.describe import describe_instance
from stagemesh.services.broker.directory import Directory, flaw
from stagemesh.services.broker.fences import Fences
from stagemesh.services.broker.gathering import check_leg
from stagemesh.services.broker.heads import Heads
from stagemesh.services.broker.progress import ProgressWatch
from stagemesh.services.broker.reported import Reported
from stagemesh.services.broker.stalls import LOOK_S, Stalls
from stagemesh.services.broker.watchers import Updates, Watchers
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.codec.mesh import instance_from_pb, progress_from_pb
from stagemesh.shared.codec.tickets import leg_from_pb
from stagemesh.shared.core.directory import InstanceInfo, Role
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.errors import ProtocolViolation, Rejected, Retryable
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.runtime.tasks import Tasks

LOST_AFTER_S = 2.0
PARTS = 8
ROUTER_GONE_AFTER_S = 5.0
LEFT = "it has left"
REAPED = "its processes have ended"
STUCK = "it makes no progress"
BROKEN, ENDED, SILENT = "its stream has broken", "its stream has ended", "it is silent"


class Members:
    """Owns the directory and the connections to the heads in it. `broker` says which start of the broker this is.
    `on_joined` hears of heads that join, with the tickets that they know, `on_lost` of instances that have gone, in
    whatever way, `on_router_gone` of routers. An epoch
    that is lost never comes back: its instance starts again."""

    def __init__(
        self,
        broker: str,
        tasks: Tasks,
        log: Log,
        fences: Fences,
        *,
        on_joined: Callable[[InstanceInfo, list[TicketLeg]], None],
        on_lost: Callable[[InstanceRef], None],
        on_router_gone: Callable[[str], None],
        events: Events,
        dial: Dial = PLAIN,
        rejoin_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """After a stall of this process heads have `rejoin_s` to come back."""
        self._clock, self._stalls = clock, Stalls(rejoin_s, clock())
        self._tasks, self._log, self._fences, self._events = tasks, log, fences, events
        self._progress, self.lost_by_reason = ProgressWatch(), Counter[str]()
        self._on_joined, self._on_lost, self._on_router_gone = on_joined, on_lost, on_router_gone
        self._directory, self.heads = Directory(), Heads(dial)
        self._watchers = Watchers(self._directory, broker)
        self._streams: dict[InstanceRef, object] = {}  # the last one that each head has opened
        self._reports: dict[InstanceRef, Reported] = {}
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
        first = await _first(reports)
        if first is None:
            return
        info, leaving, why = instance_from_pb(first.info), first.leaving, BROKEN
        ref, legs = info.ref, [check_leg(info.role, leg_from_pb(ticket)) for ticket in first.tickets]
        self._report(info)
        updates = self._streams[ref] = self._watchers.add()
        try:
            self._on_joined(info, legs)
            silence = _Silence()
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(work) for work in (_send(updates, context), silence.watch())]
                async for report in reports:
                    silence.broken()
                    leaving = report.leaving
                    self._report(_same(ref, instance_from_pb(report.info)))
                    self._look()
                    if still := self._progress.stuck(ref, map(progress_from_pb, report.progress), self._clock()):
                        why = STUCK
                        self._log.warning("an instance stands still", instance_name=ref.name, reason=still)
                        raise ProtocolViolation(f"{ref} is lost: {still}")
                    self._heard(ref, report)
                why = ENDED
                for other in others:
                    other.cancel()
        except* _Silent:
            why = SILENT
        finally:
            self._watchers.remove(updates)
            if self._streams.get(ref) is updates:  # else it has come back by another
                del self._streams[ref]
                self._tasks.spawn(self._gone(ref, why=LEFT if leaving else why))

    def gathered(self) -> None:
        """Who is not here is gone."""
        self._watchers.gathered()

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
        if self._fences.is_lost(info.ref):
            raise ProtocolViolation(f"{info.ref} is lost: it must start again, under a new epoch")
        known = self._directory.get(info.ref)
        change = self._directory.report(info)
        if change is None:
            raise ProtocolViolation(f"{info.ref} has been replaced by a later epoch")
        if known is None:
            self.heads.add(info)
            self._log.info("an instance has joined", instance_name=info.ref.name, instance_epoch=info.ref.epoch)
            details = {"role": info.role.value, "address": info.address, "pp_size": len(info.stages)}
            self._events.say(EventKind.JOINED, info.ref.name, epoch=info.ref.epoch, **details)
            self._reports[info.ref] = Reported(now_s := self._clock(), now_s, now_s)
        self._watchers.tell(change)
        for replaced in change.removed:
            self._lose(replaced)

    def lose_until(self, ref: InstanceRef, *, why: str) -> None:
        """That epoch and all before it are lost."""
        for info in list(self._directory):
            if info.ref.name == ref.name and info.ref.epoch <= ref.epoch:
                self._tasks.spawn(self._gone(info.ref, why=why))

    def _heard(self, ref: InstanceRef, report: broker_pb2.InstanceReport) -> None:
        for event, details in self._reports[ref].take(report, self._clock()):
            self._events.say(event, ref.name, epoch=ref.epoch, **details)

    async def look(self) -> None:
        """A child of the broker: runs until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        if away_s := self._stalls.look(self._clock()):
            self._log.warning("this broker has stood still: heads may come back", away_s=round(away_s, 1))
            self._progress.excuse()

    async def _gone(self, ref: InstanceRef, *, why: str) -> None:
        if why in (BROKEN, ENDED, SILENT):
            self._look()
            await asyncio.sleep(self._stalls.left_s(self._clock()))
        if ref in self._streams:
            return
        if (change := self._directory.remove(ref)) is None:  # lost before, or replaced by a later epoch
            await self.heads.remove(ref)
            return
        said = self._log.info if why == LEFT else self._log.warning
        said("an instance is gone", instance_name=ref.name, instance_epoch=ref.epoch, reason=why)
        self.lost_by_reason[why] += 1
        left = why == LEFT
        self._events.say(EventKind.LEFT if left else EventKind.LOST, ref.name, epoch=ref.epoch, reason=why)
        self._watchers.tell(change)
        self._lose(ref)
        await self.heads.remove(ref)

    def _lose(self, ref: InstanceRef) -> None:
        self._reports.pop(ref, None)
        self._progress.forget(ref)
        self._fences.lose(ref)
        self._on_lost(ref)

    # -- views --

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def by_role(self) -> Mapping[str, int]:
        roles = Counter(info.role for info in self._directory)
        return {role.value: roles[role] for role in Role}

    def named(self, name: str) -> tuple[InstanceInfo, Reported]:
        """Raises Rejected, naming those there are."""
        for info in self._directory:
            if info.ref.name == name:
                return info, self._reports[info.ref]
        known = ", ".join(sorted(info.ref.name for info in self._directory)) or "none"
        raise Rejected("instance", f"no instance is named {name!r}; there are {known}")

    @property
    def reported(self) -> list[tuple[InstanceInfo, Reported]]:
        """Each instance, and what it has said last."""
        return [(info, self._reports[info.ref]) for info in self._directory]

    def describe(self, now_s: float) -> Iterator[Entry]:
        return (describe_instance(info, self._reports[info.ref], now_s) for info in self._directory)


def _same(ref: InstanceRef, info: InstanceInfo) -> InstanceInfo:
    """Raises ProtocolViolation for a report of another instance, or another epoch, than the stream has begun with."""
    if info.ref != ref:
        raise ProtocolViolation(f"a stream is one instance's: it was {ref}, and reports {info.ref}")
    return info


class _Silent(Exception):
    """Nothing has come for LOST_AFTER_S."""


class _Silence:
    """How long a stream has been silent. The time in which this process itself did not run (stopped, starved) hardly
    counts: what has come meanwhile is read before the next part of the limit is over."""

    def __init__(self) -> None:
        self._heard = True

    def broken(self) -> None:
        """Something has come."""
        self._heard = True

    async def watch(self) -> None:
        """Raises _Silent."""
        quiet = 0
        while quiet < PARTS:
            self._heard = False
            await asyncio.sleep(LOST_AFTER_S / PARTS)
            quiet = 0 if self._heard else quiet + 1
        raise _Silent


async def _first(reports: AsyncIterator[broker_pb2.InstanceReport]) -> broker_pb2.InstanceReport | None:
    """None if none comes."""
    try:
        async with asyncio.timeout(LOST_AFTER_S):
            return await anext(reports, None)
    except TimeoutError:
        return None


async def _send(updates: Updates, context: Any) -> None:
    while (update := await updates.get()) is not None:
        await context.write(update)
