"""An instance's place in the directory: its head's stream of reports to the broker.

join, with all tickets --report every 0.5 s--> ... --leaving--> end       serving <--drain, resume--> draining
  |--the broker is away: again, with back-off; what runs goes on meanwhile
  `--the broker has lost this epoch: the instance ends, and starts again under a new one
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from stagemesh.shared.codec.mesh import instance_to_pb, progress_to_pb
from stagemesh.shared.codec.tickets import leg_to_pb
from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.errors import ProtocolViolation, StagemeshError
from stagemesh.shared.fsm.instance import INSTANCE, InstanceEvent, InstanceState
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.duplex import Duplex
from stagemesh.shared.runtime.backoff import delays

REPORT_INTERVAL_S = 0.5
LEAVE_S = 2.0


class Progress(Protocol):
    """What a head reports of itself."""

    @property
    def load(self) -> InstanceLoad: ...

    @property
    def progress(self) -> tuple[StageProgress, ...]: ...

    @property
    def has_work(self) -> bool: ...

    def tell_tickets(self) -> list[TicketLeg]: ...

    def on_joined(self, broker: str) -> None: ...


class Membership:
    """Reports for `info` until told to leave."""

    def __init__(self, broker: Client, info: InstanceInfo, progress: Progress) -> None:
        self._broker, self._info, self._progress = broker, info, progress
        self._state, self._leaving = InstanceState.SERVING, False
        self._changed, self._told, self._has_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """No new work from now on, and the end of the stream is no loss."""
        self._leaving = True
        self._changed.set()

    async def left(self) -> None:
        """Leaves, and waits until that is said, unless the broker is away."""
        self.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._has_left.wait()

    async def drain(self) -> None:
        """No new work from now on. Returns when the directory says so. A no-op once it is so."""
        if self._state is InstanceState.SERVING:
            self._move(InstanceEvent.DRAIN)
        await self._told.wait()

    def resume(self) -> None:
        """New work is welcome. A no-op if it is already."""
        if self._state is InstanceState.DRAINING:
            self._move(InstanceEvent.RESUME)

    def _move(self, event: InstanceEvent) -> None:
        self._state = INSTANCE.advance(str(self._info.ref), self._state, event)
        self._told.clear()
        self._changed.set()

    @property
    def _accepting(self) -> bool:
        return self._state is InstanceState.SERVING and not self._leaving

    async def run(self) -> None:
        """A child of the head: runs until cancelled."""
        for delay_s in delays():
            stream = self._broker.open("Join")
            try:
                await stream.send(self._message(self._progress.tell_tickets()))
                async with asyncio.TaskGroup() as group:
                    reader = group.create_task(self._read(stream))
                    await self._report(stream)
                    reader.cancel()
            except* ProtocolViolation:  # this epoch is lost to the mesh: whoever goes on in its name would do harm
                raise
            except* StagemeshError:
                await asyncio.sleep(delay_s)
            finally:
                stream.cancel()

    async def _report(self, stream: Duplex) -> None:
        while True:
            try:
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await stream.send(message := self._message())
            if message.leaving:
                self._has_left.set()

    async def _read(self, stream: Duplex) -> None:
        """The directory comes down; a head needs only to know that it has been taken in, and by whom."""
        async for update in stream.receive():
            if update.broker:
                self._progress.on_joined(update.broker)
            if any(i.name == self._info.ref.name and i.accepting == self._accepting for i in update.changed):
                self._told.set()

    def _message(self, legs: Iterable[TicketLeg] = ()) -> broker_pb2.InstanceReport:
        info = dataclasses.replace(self._info, load=self._progress.load, accepting=self._accepting)
        return broker_pb2.InstanceReport(
            info=instance_to_pb(info),
            progress=map(progress_to_pb, self._progress.progress),
            has_work=self._progress.has_work,
            leaving=self._leaving,
            tickets=map(leg_to_pb, legs),
        )
