"""Calls to the last stages of instances: they learn of a request's structure before the request is sent off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from stagemesh.shared.codec.commands import structure_to_pb
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.errors import Cancelled, PeerLost, Retryable, Unreachable
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.rpc.errors import first_of_ours

INSTANCE = instance_pb2.DESCRIPTOR.services_by_name["Instance"]
PREPARE_S: Final = 60.0  # the first one of an instance waits for its compiler to start


class StageLost(Retryable):
    """Nobody answers any more where the last stage of `instance` was."""

    def __init__(self, instance: InstanceRef, reason: str) -> None:
        super().__init__(f"the last stage of {instance.name} is lost: {reason}")
        self.instance = instance


class LastStages:
    """One channel for each that has been called and is there still."""

    def __init__(self, dial: Dial = PLAIN) -> None:
        self._dial = dial
        self._clients: dict[str, Client] = {}

    async def prepare(self, instances: Iterable[InstanceInfo], structure: Structure) -> None:
        """On all of them at once. Raises Rejected if it is none or takes too much, Exhausted, Retryable; StageLost if
        one of them is not there any more."""
        try:
            async with asyncio.TaskGroup() as group:
                for info in instances:
                    group.create_task(self._prepare(info, structure))
        except ExceptionGroup as errors:
            raise first_of_ours(errors) from None

    async def _prepare(self, info: InstanceInfo, structure: Structure) -> None:
        address = info.stages[-1].address
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = Client(address, INSTANCE, wait=False, dial=self._dial)
        request = instance_pb2.PrepareStructureRequest(structure=structure_to_pb(structure))
        try:
            await client.call("PrepareStructure", request, timeout_s=PREPARE_S)
        except (Unreachable, PeerLost, Cancelled) as error:  # the latter two if `keep` forgets it meanwhile
            raise StageLost(info.ref, str(error)) from None

    async def keep(self, instances: Iterable[InstanceInfo]) -> None:
        """Forgets the stages of all others."""
        present = {info.stages[-1].address for info in instances if info.stages}
        for address in [address for address in self._clients if address not in present]:
            await self._clients.pop(address).__aexit__(None, None, None)

    async def close(self) -> None:
        await self.keep(())
