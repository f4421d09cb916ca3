"""The router as a process."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

from stagemesh.services.router.attempt import Starter
from stagemesh.services.router.attend import attend
from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.engine_api import EngineService
from stagemesh.services.router.generator import GENERATOR, GeneratorService
from stagemesh.services.router.opening import Tickets
from stagemesh.services.router.prefixes import PrefixIndex
from stagemesh.services.router.session import HeadSession
from stagemesh.services.router.validate import max_request_bytes
from stagemesh.shared.config import Config
from stagemesh.shared.core.directory import Role
from stagemesh.shared.model.source import open_model
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log, choose_form, configure
from stagemesh.shared.obs.metrics import Identity, Sample
from stagemesh.shared.obs.otel import open_spans
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.rpc.access import api_callers, mesh_access, public_listening
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.engine_proto import engine_proto
from stagemesh.shared.rpc.inspect import INSPECT, InspectService
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.loop import LagSampler
from stagemesh.shared.runtime.monitor import Monitor
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import Child, run_to_end
from stagemesh.shared.runtime.tasks import Tasks


class RouterService:
    """A `Service`. It is ready once a prefill and a decode instance can be reached."""

    def __init__(self, config: Config, notifier: Notifier, log: Log) -> None:
        self._config, self._notifier, self._log = config, notifier, log
        self._tracer, self._lag, self._tasks = Tracer("router"), LagSampler(), Tasks()
        self._dial = mesh_access(config.tls, log).dial
        self._listening, self._callers = public_listening(config.tls, log), api_callers(config.auth, log)
        certificates = {"mesh": self._dial.material, "public": self._listening.material}
        self._monitor = Monitor(config.metrics, Identity("router"), self, self._lag, certificates)
        self._generator: GeneratorService | None = None
        self._mesh: MeshView | None = None
        self._address: str | None = None
        self._server: Server | None = None

    @property
    def address(self) -> str | None:
        return self._address

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        stack.callback(self._tasks.close)
        await self._monitor.start(stack, self._notifier, self._log)
        spans = open_spans(stack, self._config, service="router", process="router")
        self._notifier.status("loading the tokenizer")
        source = await asyncio.to_thread(open_model, self._config.model.spec)
        tokenizer = await asyncio.to_thread(source.tokenizer)
        await asyncio.to_thread(tokenizer.start)
        broker = await stack.enter_async_context(Client(self._config.broker.listen, BROKER, dial=self._dial))
        name = f"router-{os.getpid()}-{secrets.token_hex(4)}"  # pids of two hosts may be the same
        self._mesh = mesh = MeshView(
            broker,
            name,
            lambda info, on_up: HeadSession(info, name, self._tasks.spawn, self._log, on_up, self._dial),
            self._log,
            PrefixIndex() if self._config.engine.prefix_cache else PrefixIndex(max_pages=0),
            self._dial,
        )
        wait_s = self._config.router.broker_wait_s
        tickets = Tickets(BrokerClient(broker, name), self._tasks.spawn, self._log, wait_s)
        stack.push_async_callback(mesh.close)
        self._generator = GeneratorService(
            section=self._config.router,
            model=self._config.model.path,
            dtype=self._config.model.dtype,
            config=source.config,
            tokenizer=tokenizer,
            mesh=mesh,
            start=Starter(mesh, tickets, self._tasks.spawn),
            callers=self._callers,
            ageing_s=self._config.engine.priority_ageing_s,
            max_ahead=self._config.router.max_ahead_requests or 2 * self._config.engine.max_prefill_sequences,
            log=self._log,
            spans=spans,
        )
        inspect = InspectService(self, self._tracer, self._peers, metrics_address=self._monitor.address)
        services = {GENERATOR: self._generator, INSPECT: inspect}
        if (proto := engine_proto()) is not None:
            services[proto.service] = EngineService(proto, self._generator, tokenizer, self._config.model.served_name)
        limit = max_request_bytes(self._config.router.max_text_bytes, source.config.max_context)
        server = Server(services, self._listening, self._callers, limit)
        self._address = await server.start(self._config.router.listen)
        stack.push_async_callback(server.stop)
        await self._wait_for_instances(stack, mesh)
        await server.set_serving(True)
        self._server = server
        self._log.info("router is up", address=self._address)
        return [self._lag.run(), self._monitor.run(), attend(broker, name, self._generator)]

    async def withdraw(self) -> None:
        if self._server is not None:
            await self._server.set_serving(False)
        if self._generator is not None:
            self._generator.refuse()

    async def idle(self) -> None:
        if self._generator is not None:
            await self._generator.empty()

    async def _wait_for_instances(self, stack: AsyncExitStack, mesh: MeshView) -> None:
        self._notifier.status("waiting for a prefill and a decode instance")
        self._tasks.spawn(mesh.run())
        group = await stack.enter_async_context(asyncio.TaskGroup())
        running = group.create_task(self._tasks.run())
        stack.callback(running.cancel)
        while {Role.PREFILL, Role.DECODE} - {info.role for info in mesh}:
            mesh.changed.clear()
            await mesh.changed.wait()

    def _peers(self) -> Mapping[str, str]:
        known = {} if self._mesh is None else self._mesh.peers()
        return {"router": self._address or "", "broker": self._config.broker.listen, **known}

    # -- views --

    def check_integrity(self) -> None:
        """The router owns no pages and no tickets: its invariants are about requests."""
        if self._generator is not None:
            self._generator.check_integrity()

    @property
    def held(self) -> Mapping[str, int]:
        if self._generator is None:
            return {"requests": 0, "waiting": 0}
        return {"requests": self._generator.num_live, "waiting": self._generator.num_waiting}

    @property
    def gauges(self) -> Mapping[str, int]:
        instances = 0 if self._mesh is None else len(list(self._mesh))
        return {"instances": instances, "loop_lag_max_us": round(self._lag.max_lag_s * 1e6)}

    def measure(self) -> Iterable[Sample]:
        if self._generator is not None:
            yield Sample(metrics.UNAUTHENTICATED, self._callers.num_refused)
            yield from self._generator.records.measure()

    def describe(self) -> Iterable[Entry]:
        now_s = time.monotonic()
        requests = [] if self._generator is None else list(self._generator.records.describe(now_s))
        return [*requests, *([] if self._mesh is None else self._mesh.describe(now_s))]


def run(config: Config, instance: str | None = None, pp_rank: int | None = None) -> None:
    """Runs the router until it is told to stop."""
    log = configure("router", form=choose_form(os.environ, sys.stderr))
    notifier = Notifier.from_environ(os.environ)
    service = RouterService(config, notifier, log)
    run_to_end(service, drain_timeout_s=config.engine.drain_timeout_s, notifier=notifier, log=log)
