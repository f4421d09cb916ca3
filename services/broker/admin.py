"""The commands of operators, carried out: what the broker knows it answers, for the rest it asks heads and routers.

NATS away --> connected: commands are served, events said --> away: both wait --> ...   the data path needs none of it
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec

from stagemesh.services.broker.members import Members
from stagemesh.services.broker.reported import Reported
from stagemesh.services.broker.routers import Routers
from stagemesh.shared.admin import requests as wire
from stagemesh.shared.admin.redact import redacted
from stagemesh.shared.bus.base import BusStats
from stagemesh.shared.bus.events import EventKind, Events, events_subject
from stagemesh.shared.config import Config
from stagemesh.shared.core.directory import InstanceInfo, Role
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.entry import decode_entries
from stagemesh.shared.pb import broker_pb2, instance_pb2

CALL_TIMEOUT_S: Final = 5.0
SWITCH_S: Final = 150.0
"""Of a role, after the drain: an instance that is not connected again by then has ended itself."""
SELF: Final = "broker"
"""Its name where those of instances stand."""


class Tickets(Protocol):
    """What the commands show of KV transfers."""

    def by_state(self) -> dict[str, int]: ...

    @property
    def closed_by_outcome(self) -> dict[str, int]: ...


class BusView(Protocol):
    @property
    def stats(self) -> BusStats: ...


class Admin:
    """One method a command: a request that is right in itself in, an answer out."""

    def __init__(
        self,
        config: Config,
        broker: str,
        members: Members,
        routers: Routers,
        tickets: Tickets,
        events: Events,
        bus: BusView,
    ) -> None:
        self._config, self._broker, self._bus = config, broker, bus
        self._members, self._routers, self._tickets, self._events = members, routers, tickets, events
        self._since_s = time.monotonic()
        self.carry_out: Final[Mapping[str, Callable[[Any], Awaitable[msgspec.Struct]]]] = {
            "mesh.status": self._status,
            "instance.list": self._list,
            "instance.drain": self._drain,
            "instance.resume": self._resume,
            "instance.set": self._set,
            "role.switch": self._switch,
            "request.list": self._requests,
            "request.abort": self._abort,
            "cache.flush": self._flush,
            "config.get": self._get_config,
            "events": self._last_events,
        }

    # -- the mesh --

    async def _status(self, request: wire.Nothing) -> wire.MeshStatus:
        reported = self._members.reported
        loads = [info.load for info, _ in reported]
        stats = self._bus.stats
        return wire.MeshStatus(
            mesh=self._config.mesh.name,
            broker=self._broker,
            up_s=round(time.monotonic() - self._since_s, 3),
            routers=self._routers.names,
            instances=dict(self._members.by_role),
            states=dict(Counter(heard.state.value for _, heard in reported)),
            waiting=sum(load.waiting for load in loads),
            running=sum(load.running for load in loads),
            pages_free=sum(load.pages_free for load in loads),
            pages=sum(info.manifest.num_pages for info, _ in reported),
            tickets=self._tickets.by_state(),
            tickets_closed=self._tickets.closed_by_outcome,
            nats=wire.BusStatus(
                connected=stats.connected,
                events_dropped=self._events.num_dropped,
                slow=stats.num_slow,
                reconnects=stats.num_reconnects,
            ),
        )

    async def _get_config(self, request: wire.ConfigRequest) -> wire.ConfigReply:
        document = redacted(self._config)
        if request.section is None:
            return wire.ConfigReply(document)
        if request.section not in document:
            raise Rejected("section", f"must be one of {', '.join(document)}, got {request.section!r}")
        return wire.ConfigReply({request.section: document[request.section]})

    async def _last_events(self, request: wire.ListRequest) -> wire.EventsReply:
        last = list(self._events.recent)[-request.limit :]
        return wire.EventsReply(
            subject=events_subject(self._config.mesh.name, ">"),
            dropped=self._events.num_dropped,
            events=[msgspec.to_builtins(event) for event in last],
        )

    # -- instances --

    async def _list(self, request: wire.Nothing) -> wire.InstanceList:
        now_s = time.monotonic()
        return wire.InstanceList([_instance_status(info, heard, now_s) for info, heard in self._members.reported])

    async def _drain(self, request: wire.DrainRequest) -> wire.StateReply:
        info, _ = self._members.named(request.instance)
        drain = instance_pb2.DrainRequest(timeout_s=request.wait_s)
        reply = await self._members.heads.ask(info.ref, "Drain", drain, request.wait_s + CALL_TIMEOUT_S)
        return wire.StateReply(info.ref.name, "draining" if reply.held else "drained", dict(reply.held))

    async def _switch(self, request: wire.SwitchRequest) -> wire.SwitchReply:
        """Raises Rejected if nobody of its role would be left."""
        info, _ = self._members.named(request.instance)
        name, role = info.ref.name, info.role
        if request.role == role.value:
            raise Rejected("role", f"{name} is a {role.value} instance already")
        if not any(other.role is role and other.accepting for other in self._members if other.ref != info.ref):
            raise Rejected("instance", f"{name} is the only {role.value} instance that serves")
        drain_s = request.drain_timeout_s or self._config.engine.drain_timeout_s
        message = instance_pb2.SwitchRoleRequest(role=request.role, drain_timeout_s=drain_s)
        # by a connection of its own: the instance leaves the directory on its way
        reply = await self._members.heads.ask_stage(info.address, "SwitchRole", message, drain_s + SWITCH_S)
        self._events.say(EventKind.ROLE_SWITCHED, name, epoch=reply.epoch, role=request.role)
        return wire.SwitchReply(name, request.role, reply.epoch)

    async def _resume(self, request: wire.OfInstance) -> wire.StateReply:
        info, _ = self._members.named(request.instance)
        await self._ask(info, "Resume", instance_pb2.ResumeRequest())
        return wire.StateReply(info.ref.name, "serving")

    async def _set(self, request: wire.SetRequest) -> wire.SetReply:
        info, _ = self._members.named(request.instance)
        previous: float | str
        if request.setting == "log_level":
            if not isinstance(request.value, str):
                raise Rejected("value", f"of log_level must be debug, info, warning or error, got {request.value:g}")
            previous = await self._set_log_level(info, request.value)
        else:
            if isinstance(request.value, str):
                raise Rejected("value", f"of {request.setting} must be a number, got {request.value!r}")
            adjust = instance_pb2.AdjustRequest(setting=request.setting, value=request.value)
            previous = (await self._ask(info, "Adjust", adjust)).previous
        self._changed(info, f"{request.setting} {previous} -> {request.value}")
        return wire.SetReply(info.ref.name, request.setting, previous, request.value)

    async def _set_log_level(self, info: InstanceInfo, level: str) -> str:
        """On all stages. Raises Rejected for another word before any has changed."""
        replies = [
            await self._members.heads.ask_stage(stage.address, "SetLogLevel", message, CALL_TIMEOUT_S)
            for message in [instance_pb2.SetLogLevelRequest(level=level)]
            for stage in info.stages
        ]
        return str(replies[0].previous)

    async def _flush(self, request: wire.FlushRequest) -> wire.FlushReply:
        if request.instance is not None:
            infos = [self._members.named(request.instance)[0]]
        else:
            infos = [info for info in self._members if info.role is Role.PREFILL]
        pages = {}
        for info in infos:
            pages[info.ref.name] = (await self._ask(info, "FlushCache", instance_pb2.FlushCacheRequest())).pages
            self._changed(info, f"{pages[info.ref.name]} cached pages evicted")
        return wire.FlushReply(pages)

    # -- requests --

    async def _requests(self, request: wire.ListRequest) -> wire.RequestList:
        question = broker_pb2.RouterQuestion(list=broker_pb2.RouterQuestion.ListLive(limit=request.limit))
        said = await self._routers.ask(question, CALL_TIMEOUT_S)
        found = [status for answer in said.answers for status in _requests_of(answer)]
        found.sort(key=lambda status: -status.age_s)
        total = sum(answer.total for answer in said.answers)
        return wire.RequestList(total, found[: request.limit], list(said.silent))

    async def _abort(self, request: wire.AbortRequest) -> wire.AbortReply:
        abort = broker_pb2.RouterQuestion.AbortLive(request_id=request.request_id)
        said = await self._routers.ask(broker_pb2.RouterQuestion(abort=abort), CALL_TIMEOUT_S)
        was_live = any(answer.was_live for answer in said.answers)
        if was_live:
            self._events.say(EventKind.CHANGED, SELF, what="a request is aborted", request_id=request.request_id)
        return wire.AbortReply(request.request_id, was_live)

    # -- in common --

    async def _ask(self, info: InstanceInfo, method: str, message: Any) -> Any:
        return await self._members.heads.ask(info.ref, method, message, CALL_TIMEOUT_S)

    def _changed(self, info: InstanceInfo, what: str) -> None:
        self._events.say(EventKind.CHANGED, info.ref.name, epoch=info.ref.epoch, what=what)


def _instance_status(info: InstanceInfo, heard: Reported, now_s: float) -> wire.InstanceStatus:
    progress = {said.pp_rank: said for said in heard.progress}
    stages = [
        wire.StageStatus(
            pp_rank=stage.pp_rank,
            layers=(stage.layers.lo, stage.layers.hi),
            address=stage.address,
            steps_done=progress[stage.pp_rank].steps_done if stage.pp_rank in progress else 0,
            has_work=stage.pp_rank in progress and progress[stage.pp_rank].has_work,
        )
        for stage in info.stages
    ]
    return wire.InstanceStatus(
        name=info.ref.name,
        role=info.role.value,
        state=heard.state.value,
        epoch=info.ref.epoch,
        address=info.address,
        waiting=info.load.waiting,
        running=info.load.running,
        waiting_tokens=info.load.waiting_tokens,
        pages_free=info.load.pages_free,
        pages=info.manifest.num_pages,
        joined_s=round(now_s - heard.joined_s, 3),
        last_report_s=round(now_s - heard.last_s, 3),
        stages=stages,
    )


def _requests_of(answer: broker_pb2.RouterAnswer) -> Iterable[wire.RequestStatus]:
    for entry in decode_entries(answer.entries) if answer.entries else []:
        yield wire.RequestStatus(
            request_id=entry.name,
            router=answer.router,
            age_s=entry.age_s,
            state=entry.state,
            waits_for=entry.waits_for,
            on=list(entry.on),
            details=dict(entry.details),
        )
