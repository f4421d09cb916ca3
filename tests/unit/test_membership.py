"""A head's place in the directory while what answers for the broker is none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from stagemesh.shared.core.directory import InstanceLoad
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.stage import membership as membership_module
from stagemesh.shared.stage.membership import Membership
from tests.support.instances import DECODE, instance_of


class Head:
    load = InstanceLoad(0, 0, 8)
    progress = ()
    has_work = False

    def __init__(self) -> None:
        self.joined = asyncio.Event()

    def tell_tickets(self) -> list[Any]:
        return []

    def on_joined(self, broker: str) -> None:
        self.joined.set()


class Broker:
    async def Join(self, reports: Any, context: Any) -> Any:  # noqa: N802
        async for _ in reports:
            yield broker_pb2.DirectoryUpdate(broker="b")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("QUICK", "NOT_SERVED"):
            raise AttributeError(name)
        return None


def test_another_server_at_the_brokers_address_is_no_end_of_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has taken the address while the broker was away: as soon as it is back, it is joined."""
    monkeypatch.setattr(membership_module, "delays", lambda: iter(lambda: 0.01, None))

    async def run() -> None:
        head, another = Head(), Server({})
        address = await another.start(f"unix:{tmp_path}/b")
        async with Client(address, BROKER) as client:
            joining = asyncio.create_task(Membership(client, instance_of("d", DECODE), cast("Any", head)).run())
            await asyncio.wait([joining], timeout=0.5)
            assert not joining.done(), joining
            await another.stop()
            broker = Server({BROKER: Broker()})
            await broker.start(f"unix:{tmp_path}/b")
            async with asyncio.timeout(20):
                await head.joined.wait()
            joining.cancel()
            await asyncio.wait([joining])
        await broker.stop()

    asyncio.run(run())
