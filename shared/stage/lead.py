"""What rank 0 does for its instance: takes the epoch, keeps the instance in the directory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from stagemesh.shared.bus.access import bus_access
from stagemesh.shared.bus.nats import open_nats_bus
from stagemesh.shared.config import Config
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.runtime.service import Child
from stagemesh.shared.security.material import Material
from stagemesh.shared.stage.head import Head
from stagemesh.shared.stage.membership import Membership

ROLE: Final = "stage"  # its user on the bus
MAX_DRAIN_S: Final = 3600.0


async def new_epoch(config: Config, instance: str, material: Material | None, log: Log) -> int:
    """The number of this start. Waits while there is no NATS server; whether there is one later is no matter."""
    access = bus_access(config.nats, ROLE, material, config.tls.server_name)

    async def take() -> int:
        nats = config.nats
        opening = open_nats_bus(
            nats.url, name=instance, connect_timeout_s=nats.connect_timeout_s, access=access, log=log
        )
        try:
            async with opening as bus:
                return await bus.next_epoch(instance)
        except Retryable as error:
            log.warning("waiting for the NATS server", error=str(error))
            raise

    return await retry(take)


class Lead:
    """Lives as long as the epoch."""

    def __init__(self, head: Head, info: InstanceInfo, broker: Client, log: Log) -> None:
        self.head, self._log = head, log
        self._membership = Membership(broker, info, head)

    def children(self) -> list[Child]:
        return [self._membership.run()]

    async def drain(self, timeout_s: float) -> Mapping[str, int]:
        """Leaves the directory's choice and waits, up to `timeout_s`, until what runs is through: for prefill that is
        when all KV has been written out. What is left then runs on, and is returned; empty if nothing is. Raises
        Rejected for a time that is none."""
        if not 0.0 <= timeout_s <= MAX_DRAIN_S:
            raise Rejected("timeout_s", f"must be in 0..{MAX_DRAIN_S:g}, got {timeout_s}")
        self._log.info("the instance takes no new requests", timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._membership.drain()
                await self.head.idle()
        except TimeoutError:
            left = {what: count for what, count in self.head.held.items() if count} or {"not_told": 1}
            self._log.warning("the instance is not idle yet", **left)
            return left
        self._log.info("the instance is idle")
        return {}

    def resume(self) -> None:
        """Takes new requests again."""
        self._membership.resume()
        self._log.info("the instance takes new requests")

    def leave(self) -> None:
        """No new work from now on: the instance stops."""
        self._membership.leave()

    async def left(self) -> None:
        """The same, and the broker has been told, if it is there."""
        await self._membership.left()
