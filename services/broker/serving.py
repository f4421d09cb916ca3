"""The commands on NATS: served whenever there is a server, again after one that was away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import msgspec

from stagemesh import __version__
from stagemesh.services.broker.admin import SELF, Admin
from stagemesh.shared.admin.commands import COMMANDS, Command, read_request
from stagemesh.shared.bus.access import bus_access
from stagemesh.shared.bus.base import BusStats
from stagemesh.shared.bus.events import EventKind, Events
from stagemesh.shared.bus.micro import Endpoint, serve_endpoints
from stagemesh.shared.bus.nats import NatsBus, open_nats_bus
from stagemesh.shared.config import Config
from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import Sample, by_label
from stagemesh.shared.runtime.backoff import delays
from stagemesh.shared.security.material import Material

COMMAND_TIMEOUT_S: Final = 15.0
_AWAY: Final = BusStats(connected=False)


class BusLife:
    """The broker's connection to NATS. It has none at first, and need not have."""

    def __init__(self, config: Config, events: Events, material: Material | None, log: Log) -> None:
        self._config, self._events, self._log = config, events, log
        self._access = bus_access(config.nats, SELF, material, config.tls.server_name)
        self._bus: NatsBus | None = None

    @property
    def stats(self) -> BusStats:
        return _AWAY if self._bus is None else self._bus.stats

    def measure(self) -> Iterator[Sample]:
        """Of the connection, and of what is said over it."""
        stats = self.stats
        yield from by_label(metrics.EVENTS, {kind.value: self._events.by_kind[kind] for kind in EventKind})
        yield Sample(metrics.EVENTS_DROPPED, self._events.num_dropped)
        yield Sample(metrics.NATS_CONNECTED, stats.connected)
        yield Sample(metrics.NATS_RECONNECTS, stats.num_reconnects)
        yield Sample(metrics.NATS_SLOW, stats.num_slow)

    async def serve(self, admin: Admin) -> None:
        """A child of the broker: runs until cancelled."""
        endpoints = [endpoint_of(COMMANDS[name], work) for name, work in admin.carry_out.items()]
        nats = self._config.nats
        if not nats.url:
            return  # there is none
        for delay_s in delays():
            try:
                opening = open_nats_bus(
                    nats.url,
                    name=SELF,
                    connect_timeout_s=nats.connect_timeout_s,
                    access=self._access,
                    log=self._log,
                )
                async with opening as bus:
                    await self._with(bus, endpoints)
            except (Rejected, Retryable) as error:  # a wrong password, too: what needs no NATS goes on
                self._log.warning("no commands of operators can be served", error=str(error))
            await asyncio.sleep(delay_s)

    async def _with(self, bus: NatsBus, endpoints: list[Endpoint]) -> None:
        """Until cancelled: the library comes back by itself to a server that was away."""
        mesh = self._config.mesh.name
        async with serve_endpoints(bus, mesh=mesh, version=__version__, endpoints=endpoints, log=self._log):
            self._bus = bus
            self._events.attach(bus)
            try:
                await bus.run()
            finally:
                self._events.attach(None)
                self._bus = None


def endpoint_of(command: Command, carry_out: Callable[[Any], Awaitable[msgspec.Struct]]) -> Endpoint:
    """JSON in, JSON out."""
    return Endpoint(command.name, command.metadata, partial(_answer, command, carry_out))


async def _answer(command: Command, carry_out: Callable[[Any], Awaitable[msgspec.Struct]], payload: bytes) -> bytes:
    request = read_request(command, payload)
    async with asyncio.timeout(None if command.name == "role.switch" else COMMAND_TIMEOUT_S):  # which has its own
        return msgspec.json.encode(await carry_out(request))
