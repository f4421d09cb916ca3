"""The Instance service of a stage: answered by its head where there is one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from stagemesh.shared.codec.commands import structure_from_pb
from stagemesh.shared.errors import Retryable
from stagemesh.shared.obs.log import set_level
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.stage.head import Head
from stagemesh.shared.stage.lead import Lead
from stagemesh.shared.stage.structures import Structures


class HeadRpcs:
    """`lead` raises Retryable on a stage that hosts no head, or not yet; `structures` are there on the last one.
    `switch` begins anew in another role, `renew` ends the processes to be started again."""

    QUICK: ClassVar = frozenset({"CommitTicket"})

    def __init__(
        self,
        lead: Callable[[], Lead],
        structures: Callable[[], Structures | None],
        switch: Callable[[str, float], Awaitable[int]],
        renew: Callable[[int, str], None],
    ) -> None:
        self._lead, self._structures, self._switch, self._renew = lead, structures, switch, renew

    def _head(self) -> Head:
        return self._lead().head

    async def PrepareStructure(  # noqa: N802
        self, request: instance_pb2.PrepareStructureRequest, context: Any
    ) -> instance_pb2.PrepareStructureReply:
        structures = self._structures()
        if structures is None:
            raise Retryable("no last stage is up here")
        await structures.prepare(structure_from_pb(request.structure))
        return instance_pb2.PrepareStructureReply()

    async def Session(self, messages: Any, context: Any) -> None:  # noqa: N802
        await self._head().serve_session(messages, context)

    async def ReservePages(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._head().ReservePages(request, context)

    async def CommitTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._head().CommitTicket(request, context)

    async def CloseTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._head().CloseTicket(request, context)

    async def ReadOut(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._head().ReadOut(request, context)

    async def VerifyPages(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._head().VerifyPages(request, context)

    async def Adjust(  # noqa: N802
        self, request: instance_pb2.AdjustRequest, context: Any
    ) -> instance_pb2.AdjustReply:
        return instance_pb2.AdjustReply(previous=self._head().adjust(request.setting, request.value))

    async def Drain(self, request: instance_pb2.DrainRequest, context: Any) -> instance_pb2.DrainReply:  # noqa: N802
        return instance_pb2.DrainReply(held=await self._lead().drain(request.timeout_s))

    async def Resume(  # noqa: N802
        self, request: instance_pb2.ResumeRequest, context: Any
    ) -> instance_pb2.ResumeReply:
        self._lead().resume()
        return instance_pb2.ResumeReply()

    async def SwitchRole(  # noqa: N802
        self, request: instance_pb2.SwitchRoleRequest, context: Any
    ) -> instance_pb2.SwitchRoleReply:
        return instance_pb2.SwitchRoleReply(epoch=await self._switch(request.role, request.drain_timeout_s))

    async def Renew(self, request: instance_pb2.RenewRequest, context: Any) -> instance_pb2.RenewReply:  # noqa: N802
        self._renew(request.epoch, request.reason)
        return instance_pb2.RenewReply()

    async def SetLogLevel(  # noqa: N802
        self, request: instance_pb2.SetLogLevelRequest, context: Any
    ) -> instance_pb2.SetLogLevelReply:
        return instance_pb2.SetLogLevelReply(previous=set_level(request.level))

    async def FlushCache(  # noqa: N802
        self, request: instance_pb2.FlushCacheRequest, context: Any
    ) -> instance_pb2.FlushCacheReply:
        return instance_pb2.FlushCacheReply(pages=self._head().flush_cache())
