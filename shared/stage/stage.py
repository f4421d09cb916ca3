"""One stage process, whatever its role: loads, closes the ring, executes, and on rank 0 hosts the head.

start:  parts (model, pool) -> transfer endpoint -> gRPC server -> epoch -> ring -> head, directory -> ready
stop:   the head leaves the directory and waits for what runs; the other ranks wait for the head to go
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import listen_address, mesh_hosts, stage_transfer
from stagemesh.shared.core.directory import InstanceInfo, Role, StageInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import Retryable
from stagemesh.shared.link.ring import RingReceiver, RingSpec
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import Identity, Sample
from stagemesh.shared.obs.otel import open_spans
from stagemesh.shared.obs.request_spans import RequestSpans
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.rpc.access import mesh_access
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.inspect import INSPECT, InspectService
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.loop import LagSampler
from stagemesh.shared.runtime.monitor import Monitor
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import Child
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.stage.connect import Connector, Upstream
from stagemesh.shared.stage.describe import StageNames
from stagemesh.shared.stage.executors import make_executor, make_kv_sender, make_receiver
from stagemesh.shared.stage.head import INSTANCE, Head, HeadContext
from stagemesh.shared.stage.head_rpcs import HeadRpcs
from stagemesh.shared.stage.health import Health
from stagemesh.shared.stage.lead import Lead, new_epoch
from stagemesh.shared.stage.node import StageNode
from stagemesh.shared.stage.parts import StageLimits, StageParts, build_parts
from stagemesh.shared.stage.profile import StageProfiler
from stagemesh.shared.stage.reaped import note_epoch
from stagemesh.shared.stage.report import WriterReports
from stagemesh.shared.stage.ring import STAGE_LINK, RingIn, RingOut
from stagemesh.shared.stage.structures import Structures
from stagemesh.shared.transfer.backends import open_endpoint
from stagemesh.shared.transfer.base import Endpoint

MakeHead = Callable[[HeadContext], Head]


class StageService:
    """A `Service`. `make_head` is the role's; `on_stop` is called when another stage of it is being stopped."""

    def __init__(
        self,
        config: Config,
        instance: str,
        pp_rank: int,
        *,
        make_head: MakeHead,
        limits: StageLimits,
        notifier: Notifier,
        on_stop: Callable[[], None],
        log: Log,
    ) -> None:
        self._config, self._instance, self._pp_rank = config, config.instance(instance), pp_rank
        self._make_head, self._limits = make_head, limits
        self._notifier, self._on_stop, self._log = notifier, on_stop, log
        self._tracer = Tracer(f"{instance}/{pp_rank}")
        self._lag, self._tasks = LagSampler(), Tasks()
        self._monitor = Monitor(config.metrics, Identity(self._instance.role, instance, pp_rank), self, self._lag)
        self._access = mesh_access(config.tls, log)
        self._started_s = time.monotonic()
        self._node: StageNode | None = None
        self._ring_in: RingIn | None = None
        self._ring_out = RingOut()
        self._connector: Connector | None = None
        self._connected = asyncio.Event()
        self._lead: Lead | None = None
        self._profiler: StageProfiler | None = None
        self._server: Server | None = None
        self._structures: Structures | None = None

    @property
    def address(self) -> str | None:
        return None

    # -- the life of a service --

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        stack.callback(self._tasks.close)
        await self._monitor.start(stack, self._notifier, self._log)
        process, role = f"{self._instance.name}/{self._pp_rank}", self._instance.role
        spans = open_spans(stack, self._config, service=role, process=process)
        self._tracer.requests = RequestSpans(spans, role, process)
        parts = await asyncio.to_thread(
            build_parts,
            self._config,
            self._instance,
            self._pp_rank,
            self._limits,
            self._notifier.status,
            self._log,
        )
        stack.callback(parts.runner.copies.close)
        endpoint = self._open_endpoint()
        stack.push_async_callback(endpoint.close)
        pool = endpoint.publish(endpoint.register(parts.pool))
        own = StageInfo(self._pp_rank, parts.layers, self._instance.stages[self._pp_rank], pool)
        receiver = make_receiver(endpoint, parts, self._limits)
        slots = parts.inbox_spec if receiver is None else receiver.spec
        self._connector = Connector(self._instance.name, self._pp_rank, self._instance.pp_size, parts.manifest, slots)
        inspect = InspectService(self, self._tracer, metrics_address=self._monitor.address, profile=self._profile)
        instance = HeadRpcs(self._head, self._leading, lambda: self._structures)
        server = Server({STAGE_LINK: self, INSTANCE: instance, INSPECT: inspect}, self._access.listening)
        await server.start(listen_address(self._config, own.address))
        stack.push_async_callback(server.stop)
        self._notifier.status("connecting the stages")
        if parts.last:
            self._structures = Structures(parts.runner, self._config.model.spec, self._tasks.spawn, self._log)
            stack.push_async_callback(self._structures.close)
        children = await self._connect(stack, parts, endpoint, receiver, own)
        if self._structures is not None:
            children.append(self._structures.run())
        await server.set_serving(True)
        self._server = server
        self._log.info("stage is up", layers=f"[{parts.layers.lo}, {parts.layers.hi})", pages=parts.manifest.num_pages)
        return [*children, self._tasks.run(), self._lag.run(), self._monitor.run()]

    async def _stop_serving(self) -> None:
        if self._server is not None:
            await self._server.set_serving(False)

    async def withdraw(self) -> None:
        await self._stop_serving()
        if self._lead is not None:
            self._lead.leave()

    async def idle(self) -> None:
        """The head waits for what runs, then ends the ring; the end goes round it."""
        if self._lead is not None:
            await self._lead.head.idle()
            await self._ring_out.finish()
        if self._ring_in is not None:
            await self._ring_in.ended.wait()
        if self._lead is None:
            await self._ring_out.finish()

    # -- start, in parts --

    async def _connect(
        self,
        stack: AsyncExitStack,
        parts: StageParts,
        endpoint: Endpoint,
        receiver: RingReceiver | None,
        own: StageInfo,
    ) -> list[Child]:
        """Closes the ring with the other stages; on rank 0 the head comes to life then."""
        assert self._connector is not None
        epoch = None
        if parts.first:
            bus, epoch = await new_epoch(stack, self._config, self._instance.name, self._access.material, self._log)
        upstream = Upstream(epoch, ()) if epoch is not None else await self._connector.upstream
        spec, next_stage = None, None
        if self._instance.pp_size > 1:
            next_rank = (self._pp_rank + 1) % self._instance.pp_size
            address, dial = self._instance.stages[next_rank], self._access.dial
            next_stage = await stack.enter_async_context(Client(address, STAGE_LINK, dial=dial))
            spec = await self._connector.connect(next_stage, upstream, own)
        broker = await stack.enter_async_context(Client(self._config.broker.listen, BROKER, dial=self._access.dial))
        ref = InstanceRef(self._instance.name, upstream.epoch)
        self._notifier.epoch(ref.epoch)
        note_epoch(Path(self._config.mesh.run_dir), ref.name, self._pp_rank, ref.epoch, self._log)
        ring = self._ring_out
        self._node = self._make_node(parts, endpoint, receiver, spec, ring, BrokerClient(broker), ref)
        directory, stage = Path(self._config.mesh.run_dir), f"{self._instance.name}.{self._pp_rank}"
        self._profiler = StageProfiler(self._node.executor, directory, stage)
        health = Health(self._node, self._notifier, self._stop_serving, self._log)
        children: list[Child] = [self._node.executor.run(), health.pulse(), health.watch()]
        if next_stage is None:
            stages: tuple[StageInfo, ...] = (own,)
            children.append(ring.loop_back(self._node))
        else:
            self._ring_in = RingIn(self._node)
            self._connected.set()
            stages = (await self._connector.upstream).stages
            children += [ring.run(next_stage), self._ring_in.watch(self._on_stop)]
        if parts.first:
            info = InstanceInfo(ref, Role(self._instance.role), own.address, parts.manifest, stages)
            self._lead = Lead(
                self._config,
                self._make_head(self._head_context(info, broker, parts.config.vocab_size)),
                info,
                broker,
                bus,
                self._log.bind(epoch=info.ref.epoch),
            )
            self._node.head = self._lead.head
            children += self._lead.children()
        return children

    def _open_endpoint(self) -> Endpoint:
        section = stage_transfer(self._config, self._instance.stages[self._pp_rank])
        one_host = len(mesh_hosts(self._config)) == 1
        return open_endpoint(section, self._config.model.device, self._log, one_host=one_host)

    def _make_node(
        self,
        parts: StageParts,
        endpoint: Endpoint,
        receiver: RingReceiver | None,
        spec: RingSpec | None,
        ring: RingOut,
        broker: BrokerClient,
        ref: InstanceRef,
    ) -> StageNode:
        report = WriterReports(broker, ref, self._pp_rank, self._settled, self._log)
        checksums, spawn, role = Checksums(parts.pool, parts.layers), self._tasks.spawn, self._instance.role
        kv = make_kv_sender(parts, endpoint, self._config, role, spawn, report, self._tracer, checksums)
        executor = make_executor(
            parts,
            endpoint,
            receiver,
            spec,
            ring,
            kv,
            spawn=self._tasks.spawn,
            tracer=self._tracer,
            nice=self._config.engine.decode_nice if self._instance.role == "decode" else 0,
        )
        return StageNode(
            self._pp_rank,
            runner=parts.runner,
            executor=executor,
            ring=ring,
            tasks=self._tasks,
            kv=kv,
            last=parts.last,
            endpoint=endpoint,
            checksums=checksums,
        )

    async def _profile(self, seconds: float) -> Path:
        if self._profiler is None:
            raise Retryable("the stage is not up yet")
        return await self._profiler.record(seconds)

    def _settled(self, settled: stage_pb2.Settled) -> None:
        assert self._node is not None
        self._node.settled(settled)

    def _head_context(self, info: InstanceInfo, broker: Client, vocab_size: int) -> HeadContext:
        assert self._node is not None
        return HeadContext(
            info=info,
            executor=self._node.executor,
            issue=self._node.issue,
            spawn=self._tasks.spawn,
            broker=BrokerClient(broker),
            ask_read_out=self._node.ask_read_out,
            ask_verify=self._node.ask_verify,
            vocab_size=vocab_size,
            tracer=self._tracer,
            log=self._log.bind(epoch=info.ref.epoch),
        )

    # -- rpcs --

    async def Connect(self, request: stage_pb2.ConnectRequest, context: Any) -> stage_pb2.ConnectReply:  # noqa: N802
        assert self._connector is not None
        return self._connector.accept(request)

    async def Ring(self, messages: Any, context: Any) -> stage_pb2.RingClosed:  # noqa: N802
        await self._connected.wait()
        assert self._ring_in is not None
        return await self._ring_in.accept(messages)

    def _head(self) -> Head:
        """Raises Retryable where there is none, or not yet."""
        return self._leading().head

    def _leading(self) -> Lead:
        if self._lead is None:
            raise Retryable("no head is up here")
        return self._lead

    # -- views --

    def check_integrity(self) -> None:
        if self._node is not None:
            self._node.check_integrity()

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
        return [sample for part in (self._node, self._structures) if part is not None for sample in part.measure()]

    def describe(self) -> Iterable[Entry]:
        names = StageNames(self._instance.name, self._pp_rank, self._instance.pp_size)
        if self._node is None:
            age_s = time.monotonic() - self._started_s
            return [Entry("stage", names.own, age_s, "starting", "the ring to close", (names.previous,))]
        return self._node.describe(names, self._config.engine.page_size)
