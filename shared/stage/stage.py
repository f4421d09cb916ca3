"""One stage process, whatever its role: loads once, then lives one life after the other.

start:  parts (model, pool) -> transfer endpoint -> gRPC server -> first life (`life`) -> ready
life over: its streams, head and executor end --> parts of the next role, same weights and pool --> next life
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import listen_address, mesh_hosts, stage_transfer
from stagemesh.shared.core.directory import Role, StageInfo
from stagemesh.shared.errors import Exhausted, PeerLost, ProtocolViolation, Rejected, Retryable, StagemeshError
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import Identity, Sample
from stagemesh.shared.obs.otel import open_spans
from stagemesh.shared.obs.request_spans import RequestSpans
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.rpc.access import mesh_access
from stagemesh.shared.rpc.inspect import INSPECT, InspectService
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.loop import LagSampler
from stagemesh.shared.runtime.monitor import Monitor
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import Child
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.describe import StageNames
from stagemesh.shared.stage.head import INSTANCE
from stagemesh.shared.stage.head_rpcs import HeadRpcs
from stagemesh.shared.stage.lead import Lead
from stagemesh.shared.stage.life import StageBase, StageLife
from stagemesh.shared.stage.node import StageNode
from stagemesh.shared.stage.parts import build_parts, rebuild_parts
from stagemesh.shared.stage.ring import STAGE_LINK
from stagemesh.shared.stage.roles import role_parts
from stagemesh.shared.stage.structures import Structures
from stagemesh.shared.transfer.backends import open_endpoint
from stagemesh.shared.transfer.base import Endpoint

NEXT_LIFE_S: Final = 120.0
"""From the end of a life to the next one's ring being closed, graphs on a GPU included. Else the process ends."""


class StageService:
    """A `Service`. `on_stop` is called when another stage of it is being stopped."""

    def __init__(
        self,
        config: Config,
        instance: str,
        pp_rank: int,
        *,
        notifier: Notifier,
        on_stop: Callable[[], None],
        log: Log,
    ) -> None:
        self._config, self._instance, self._pp_rank = config, config.instance(instance), pp_rank
        self._notifier, self._on_stop, self._log = notifier, on_stop, log
        self._tracer = Tracer(f"{instance}/{pp_rank}")
        self._lag, self._tasks = LagSampler(), Tasks()
        self._access = mesh_access(config.tls, log)
        identity, certificates = Identity(self._instance.role, instance, pp_rank), {"mesh": self._access.material}
        self._monitor = Monitor(config.metrics, identity, self, self._lag, certificates)
        self._started_s = time.monotonic()
        self._life: StageLife | None = None
        self._life_stack = AsyncExitStack()
        self._next: asyncio.Future[int] | None = None  # the epoch of the life to come, while a role is being switched
        self._server: Server | None = None

    @property
    def address(self) -> str | None:
        return None

    # -- the life of a service --

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        stack.callback(self._tasks.close)
        await self._monitor.start(stack, self._notifier, self._log)
        process, role = f"{self._instance.name}/{self._pp_rank}", Role(self._instance.role)
        self._spans = open_spans(stack, self._config, service=role.value, process=process)
        made = role_parts(role.value, self._config)
        limits = made.limits(self._instance.pp_size)
        self._parts = await asyncio.to_thread(
            build_parts, self._config, self._instance, self._pp_rank, limits, self._notifier.status, self._log
        )
        stack.callback(self._close_copies)
        endpoint = self._open_endpoint()
        stack.push_async_callback(endpoint.close)
        pool = endpoint.publish(endpoint.register(self._parts.pool))
        self._base = StageBase(
            config=self._config,
            instance=self._instance,
            pp_rank=self._pp_rank,
            endpoint=endpoint,
            own=StageInfo(self._pp_rank, self._parts.layers, self._instance.stages[self._pp_rank], pool),
            dial=self._access.dial,
            tasks=self._tasks,
            tracer=self._tracer,
            notifier=self._notifier,
            log=self._log,
            on_stop=self._on_stop,
            on_stuck=self._stop_serving,
        )
        stack.push_async_callback(self._close_life)
        life = self._begin(role, StageLife(self._base, role, made, limits, self._parts))
        inspect = InspectService(self, self._tracer, metrics_address=self._monitor.address, profile=self._profile)
        rpcs = HeadRpcs(self._up, self._structures, self._switch, self._renew)
        server = Server({STAGE_LINK: self, INSTANCE: rpcs, INSPECT: inspect}, self._access.listening)
        await server.start(listen_address(self._config, self._base.own.address))
        stack.push_async_callback(server.stop)
        self._notifier.status("connecting the stages")
        children = await life.open(self._life_stack)
        await server.set_serving(True)
        self._server = server
        lo, hi, pages = self._parts.layers.lo, self._parts.layers.hi, self._parts.manifest.num_pages
        self._log.info("stage is up", layers=f"[{lo}, {hi})", pages=pages)
        return [self._live(life, children), self._tasks.run(), self._lag.run(), self._monitor.run()]

    def _begin(self, role: Role, life: StageLife) -> StageLife:
        """From now on this is the life that is meant."""
        process = f"{self._instance.name}/{self._pp_rank}"
        self._tracer.requests = RequestSpans(self._spans, role.value, process)
        self._monitor.identify(Identity(role.value, self._instance.name, self._pp_rank))
        self._life = life
        return life

    def _open_endpoint(self) -> Endpoint:
        section = stage_transfer(self._config, self._instance.stages[self._pp_rank])
        one_host = len(mesh_hosts(self._config)) == 1
        return open_endpoint(section, self._config.model.device, self._log, one_host=one_host)

    def _close_copies(self) -> None:
        self._parts.runner.copies.close()

    async def _close_life(self) -> None:
        stack, self._life_stack = self._life_stack, AsyncExitStack()
        await stack.aclose()

    async def _stop_serving(self) -> None:
        if self._server is not None:
            await self._server.set_serving(False)

    async def withdraw(self) -> None:
        await self._stop_serving()
        if self._life is not None:
            await self._life.leave()

    async def idle(self) -> None:
        if self._life is not None and self._life.is_open:
            await self._life.idle()

    # -- one life after the other --

    async def _live(self, life: StageLife, children: list[Child]) -> None:
        """A child of the service: runs until cancelled. Raises PeerLost if a life does not follow the one before."""
        while True:
            role = await life.run(children)
            try:
                async with asyncio.timeout(NEXT_LIFE_S):
                    life, children = await self._follow(role)
            except TimeoutError:
                raise PeerLost(f"the stages are not connected {NEXT_LIFE_S:g} s after a role was switched") from None
            if self._next is not None and not self._next.done():
                self._next.set_result(life.epoch)
            self._log.info("the role is switched", role=role.value, epoch=life.epoch)

    async def _follow(self, role: Role) -> tuple[StageLife, list[Child]]:
        assert self._life is not None
        self._life.release()
        await self._close_life()
        made = role_parts(role.value, self._config)
        limits = made.limits(self._instance.pp_size)
        self._close_copies()
        self._parts = await asyncio.to_thread(
            rebuild_parts, self._parts, self._config, self._instance, role.value, limits, self._notifier.status
        )
        life = self._begin(role, StageLife(self._base, role, made, limits, self._parts))
        return life, await life.open(self._life_stack)

    async def _switch(self, role: str, timeout_s: float) -> int:
        """Rank 0: the epoch of the instance in its other role. Raises Retryable if it has work for too long, Rejected
        for a role that it has, or cannot have."""
        self._up()
        life = self._life
        assert life is not None
        if role not in (known.value for known in Role) or role == life.role.value:
            raise Rejected("role", f"{self._instance.name} is a {life.role.value} instance: it cannot become {role!r}")
        if (why := self._parts.bound_to_role) is not None:
            raise Rejected("role", why)
        if self._next is not None:
            raise Exhausted(f"{self._instance.name} is being switched already")
        following: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._next = following
        self._tasks.spawn(self._retire(life, Role(role), timeout_s or self._config.engine.drain_timeout_s))
        return await asyncio.shield(following)  # whoever asks may go: it goes on

    async def _retire(self, life: StageLife, role: Role, timeout_s: float) -> None:
        following = self._next
        assert following is not None
        try:
            await life.retire(role, timeout_s)
            await following
        except StagemeshError as error:
            following.set_exception(error)
        finally:
            self._next = None

    def _renew(self, epoch: int, reason: str) -> None:
        """Rank 0: drains and ends the processes of the instance, to be started again by whoever starts them. Raises
        Retryable while its role is switched, ProtocolViolation for an epoch that is over."""
        self._up()
        assert self._life is not None
        if self._next is not None:
            raise Retryable(f"{self._instance.name} is being switched")
        if epoch != self._life.epoch:
            raise ProtocolViolation(f"epoch {epoch} is meant, this is {self._life.epoch}")
        self._log.warning("the instance ends to be started again", epoch=epoch, reason=reason)
        self._notifier.again(reason)
        self._on_stop()

    # -- rpcs --

    async def _profile(self, seconds: float) -> Path:
        if self._life is None or self._life.profiler is None:
            raise Retryable("the stage is not up yet")
        return await self._life.profiler.record(seconds)

    async def Connect(self, request: stage_pb2.ConnectRequest, context: Any) -> stage_pb2.ConnectReply:  # noqa: N802
        assert self._life is not None
        return self._life.accept(request)

    async def Ring(self, messages: Any, context: Any) -> stage_pb2.RingClosed:  # noqa: N802
        assert self._life is not None
        return await self._life.ring(messages)

    def _structures(self) -> Structures | None:
        return None if self._life is None else self._life.structures

    def _up(self) -> Lead:
        """Raises Retryable where there is none, or not yet."""
        if self._life is None or self._life.lead is None:
            raise Retryable("no head is up here")
        return self._life.lead

    # -- views --

    @property
    def _node(self) -> StageNode | None:
        return None if self._life is None else self._life.node

    def check_integrity(self) -> None:
        if (node := self._node) is not None:
            node.check_integrity()

    @property
    def held(self) -> Mapping[str, int]:
        return {} if self._node is None else self._node.held

    @property
    def gauges(self) -> Mapping[str, int]:
        lag = {"loop_lag_max_us": round(self._lag.max_lag_s * 1e6)}
        if self._node is None:
            return {"steps_done": 0, **lag}
        executor, head = self._node.executor, self._node.head
        return {"steps_done": executor.steps_done, **lag, **executor.gauges, **({} if head is None else head.gauges)}

    def measure(self) -> Iterable[Sample]:
        return [sample for part in (self._node, self._structures()) if part is not None for sample in part.measure()]

    def describe(self) -> Iterable[Entry]:
        names = StageNames(self._instance.name, self._pp_rank, self._instance.pp_size)
        if self._node is None:
            age_s = time.monotonic() - self._started_s
            return [Entry("stage", names.own, age_s, "starting", "the ring to close", (names.previous,))]
        return self._node.describe(names, self._config.engine.page_size)
