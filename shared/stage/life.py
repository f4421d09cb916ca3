"""One life of an instance in one of its stages: what has the role and the epoch. Weights and pool outlive it.

open:  epoch -> ring -> head, directory -> ... --stop--> the head leaves, waits for what runs, ends the ring
                                               --retire for another role--> the same, and the ring tells the others
The end goes round the ring: each stage hears it from the one before, and passes it on. When the head has it back, every
stage is at the end of this life.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagemesh.shared.config import Config, InstanceSection
from stagemesh.shared.core.directory import InstanceInfo, Role, StageInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.engine.schedule.decode_settings import StepRoom
from stagemesh.shared.errors import Retryable
from stagemesh.shared.link.ring import RingSpec
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import Dial
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import Child
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.stage.connect import Connector, Upstream
from stagemesh.shared.stage.executors import make_executor, make_kv_sender, make_receiver
from stagemesh.shared.stage.head import HeadContext
from stagemesh.shared.stage.health import Health
from stagemesh.shared.stage.lead import Lead, new_epoch
from stagemesh.shared.stage.node import StageNode
from stagemesh.shared.stage.parts import StageLimits, StageParts
from stagemesh.shared.stage.profile import StageProfiler
from stagemesh.shared.stage.reaped import note_epoch
from stagemesh.shared.stage.report import WriterReports
from stagemesh.shared.stage.ring import STAGE_LINK, RingIn, RingOut
from stagemesh.shared.stage.roles import RoleParts
from stagemesh.shared.stage.structures import Structures
from stagemesh.shared.transfer.base import Endpoint

STOP: Final = ""
"""In place of the next role: the processes end."""


@dataclass(frozen=True, slots=True)
class StageBase:
    """What a stage has whatever its role. `on_stop` is called when another stage of it is being stopped, `on_stuck`
    when it makes no progress."""

    config: Config
    instance: InstanceSection
    pp_rank: int
    endpoint: Endpoint
    own: StageInfo
    dial: Dial
    tasks: Tasks
    tracer: Tracer
    notifier: Notifier
    log: Log
    on_stop: Callable[[], None]
    on_stuck: Callable[[], Awaitable[None]]


class StageLife:
    """`role` has `parts` of its own. Opened once, ended once."""

    def __init__(self, base: StageBase, role: Role, made: RoleParts, limits: StageLimits, parts: StageParts) -> None:
        self._base, self.role, self._made, self._limits, self._parts = base, role, made, limits, parts
        self.node: StageNode | None = None
        self.lead: Lead | None = None
        self.profiler: StageProfiler | None = None
        self._ring_out = RingOut()
        self._ring_in: RingIn | None = None
        self._connected, self._over = asyncio.Event(), asyncio.Event()
        self._next_role = STOP
        self.epoch = 0
        self.is_open = False
        self._receiver = make_receiver(base.endpoint, parts, limits)
        self.structures: Structures | None = None
        slots = parts.inbox_spec if self._receiver is None else self._receiver.spec
        instance = base.instance
        self._connector = Connector(instance.name, base.pp_rank, instance.pp_size, parts.manifest, slots)

    # -- from open to over --

    async def open(self, stack: AsyncExitStack) -> list[Child]:
        """Closes the ring with the other stages; on rank 0 the head comes to life then. The children to be run."""
        base, parts = self._base, self._parts
        if parts.last:
            self.structures = Structures(parts.runner, base.config.model.spec, base.tasks.spawn, base.log)
            stack.push_async_callback(self.structures.close)
        epoch = await new_epoch(base.config, base.instance.name, base.dial.material, base.log) if parts.first else None
        upstream = Upstream(epoch, ()) if epoch is not None else await self._connector.upstream
        spec, next_stage = None, None
        if base.instance.pp_size > 1:
            next_rank = (base.pp_rank + 1) % base.instance.pp_size
            address = base.instance.stages[next_rank]
            next_stage = await stack.enter_async_context(Client(address, STAGE_LINK, dial=base.dial))
            spec = await self._connector.connect(next_stage, upstream, base.own)
        broker = await stack.enter_async_context(Client(base.config.broker.listen, BROKER, dial=base.dial))
        ref, self.epoch = InstanceRef(base.instance.name, upstream.epoch), upstream.epoch
        base.notifier.epoch(ref.epoch)
        note_epoch(Path(base.config.mesh.run_dir), ref.name, base.pp_rank, ref.epoch, base.log)
        self.node = node = self._make_node(spec, BrokerClient(broker), ref)
        directory, stage = Path(base.config.mesh.run_dir), f"{base.instance.name}.{base.pp_rank}"
        self.profiler = StageProfiler(node.executor, directory, stage)
        health = Health(node, base.notifier, base.on_stuck, base.log)
        children: list[Child] = [node.executor.run(), health.pulse(), health.watch()]
        if self.structures is not None:
            children.append(self.structures.run())
        if next_stage is None:
            stages: tuple[StageInfo, ...] = (base.own,)
            children.append(self._ring_out.loop_back(node))
        else:
            self._ring_in = RingIn(node)
            self._connected.set()
            stages = (await self._connector.upstream).stages
            children += [self._ring_out.run(next_stage), self._ring_in.watch(self._on_leaving)]
        if parts.first:
            info = InstanceInfo(ref, self.role, base.own.address, parts.manifest, stages)
            head = self._made.make_head(self._head_context(node, info, broker))
            self.lead = Lead(head, info, broker, base.log.bind(epoch=upstream.epoch))
            node.head = self.lead.head
            children += self.lead.children()
        self.is_open = True
        return children

    async def run(self, children: list[Child]) -> Role:
        """Until it is over: the role of the life that follows. Cancelled when the process stops."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child) for child in children]
            await self._over.wait()
            for task in tasks:
                task.cancel()
        return Role(self._next_role)

    # -- the end --

    async def leave(self) -> None:
        """No new work: the process stops. What is sent here after that is lost, and runs on elsewhere."""
        if self.lead is not None:
            await self.lead.left()

    async def idle(self) -> None:
        """The head waits for what runs, then ends the ring; the end goes round it."""
        if self.lead is not None:
            await self.lead.head.idle()
            await self._ring_out.finish(STOP)
        if self._ring_in is not None:
            await self._ring_in.ended.wait()
        if self.lead is None:
            await self._ring_out.finish(STOP)

    async def retire(self, role: Role, timeout_s: float) -> None:
        """Rank 0: no new work, what runs is finished, and the life is over on all stages. Raises Retryable if that is
        not so in time: then it serves as before."""
        assert self.lead is not None
        lead = self.lead
        await lead.drain(timeout_s)
        try:
            lead.head.close()
        except Retryable as error:
            lead.resume()
            raise Retryable(f"{self._base.instance.name} serves on as it did: {error}") from None
        await lead.left()
        self._next_role = role.value
        await self._ring_out.finish(role.value)
        if self._ring_in is not None:
            await self._ring_in.ended.wait()
        self._over.set()

    def release(self) -> None:
        """It is over on all stages: nobody writes activations any more."""
        if self._receiver is not None:
            self._receiver.close()
        if self.node is not None:
            self.node.executor.release()

    def _on_leaving(self, next_role: str) -> None:
        """The previous stage has ended its stream."""
        if next_role == STOP:
            self._base.on_stop()
        elif self.lead is None:
            self._base.tasks.spawn(self._pass_on(next_role))

    async def _pass_on(self, next_role: str) -> None:
        await self._ring_out.finish(next_role)
        self._next_role = next_role
        self._over.set()

    # -- rpcs --

    def accept(self, request: stage_pb2.ConnectRequest) -> stage_pb2.ConnectReply:
        """Raises Retryable once it is over: the life that the caller means has not begun here."""
        if self._ring_in is not None and self._ring_in.next_role:
            raise Retryable("this stage is about to begin anew")
        return self._connector.accept(request)

    async def ring(self, messages: AsyncIterator[stage_pb2.RingMessage]) -> stage_pb2.RingClosed:
        await self._connected.wait()
        assert self._ring_in is not None
        return await self._ring_in.accept(messages)

    # -- parts --

    def _make_node(self, spec: RingSpec | None, broker: BrokerClient, ref: InstanceRef) -> StageNode:
        base, parts = self._base, self._parts
        report = WriterReports(broker, ref, base.pp_rank, self._settled, base.log)
        checksums, spawn = Checksums(parts.pool, parts.layers), base.tasks.spawn
        kv = make_kv_sender(parts, base.endpoint, base.config, self.role.value, spawn, report, base.tracer, checksums)
        executor = make_executor(
            parts,
            base.endpoint,
            self._receiver,
            spec,
            self._ring_out,
            kv,
            spawn=base.tasks.spawn,
            tracer=base.tracer,
            nice=base.config.engine.decode_nice if self.role is Role.DECODE else 0,
        )
        return StageNode(
            base.pp_rank,
            runner=parts.runner,
            executor=executor,
            ring=self._ring_out,
            tasks=base.tasks,
            kv=kv,
            last=parts.last,
            endpoint=base.endpoint,
            checksums=checksums,
        )

    def _settled(self, settled: stage_pb2.Settled) -> None:
        assert self.node is not None
        self.node.settled(settled)

    def _head_context(self, node: StageNode, info: InstanceInfo, broker: Client) -> HeadContext:
        base, parts = self._base, self._parts
        rows = self._limits.step_tokens if parts.device is None else parts.device.max_rows
        return HeadContext(
            info=info,
            executor=node.executor,
            issue=node.issue,
            spawn=base.tasks.spawn,
            broker=BrokerClient(broker),
            ask_read_out=node.ask_read_out,
            ask_verify=node.ask_verify,
            vocab_size=parts.config.vocab_size,
            tracer=base.tracer,
            log=base.log.bind(epoch=info.ref.epoch),
            room=StepRoom(self._limits.num_slots, rows, self._limits.step_tokens),
        )
