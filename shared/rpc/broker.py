"""Calling the broker."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from stagemesh.shared.codec.arrays import to_tuple
from stagemesh.shared.codec.mesh import ref_to_pb, stage_from_pb
from stagemesh.shared.core.directory import StageInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.errors import Unreachable, Unsupported
from stagemesh.shared.pb import broker_pb2
from stagemesh.shared.rpc.client import Client

BROKER = broker_pb2.DESCRIPTOR.services_by_name["Broker"]
CALL_TIMEOUT_S = 5.0
RESERVE_TIMEOUT_S = 20.0
UNRESERVE_TIMEOUT_S = 1.0  # a decode head that is short of pages waits for it


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages of a decode instance, one for each page of the prompt, and its stages."""

    pages: tuple[int, ...]
    targets: tuple[StageInfo, ...]


class BrokerClient:
    """The unary calls; those that a GPU waits for are quick. All raise what `Client` raises, and Unreachable where a
    server answers that is no broker of ours: it is as good as away."""

    def __init__(self, client: Client, router: str = "") -> None:
        """`router` is the name under which a router watches."""
        self.client, self._router = client, router

    async def open_ticket(
        self, request: RequestRef, prefill: InstanceRef, decode: InstanceRef, prompt_tokens: int, max_tokens: int
    ) -> str:
        """May be called again: for the same it gives the same ticket."""
        message = broker_pb2.OpenTicketRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill=ref_to_pb(prefill),
            decode=ref_to_pb(decode),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            router=self._router,
        )
        reply = await self._call("OpenTicket", message, timeout_s=CALL_TIMEOUT_S)
        return str(reply.ticket_id)

    async def reserve(self, ticket_id: str) -> Reservation:
        """Waits up to RESERVE_TIMEOUT_S for pages; then raises Retryable."""
        message = broker_pb2.ReserveRequest(ticket_id=ticket_id)
        reply = await self._call("Reserve", message, timeout_s=RESERVE_TIMEOUT_S)
        return Reservation(to_tuple(reply.pages), tuple(stage_from_pb(target) for target in reply.targets))

    async def fill(self, ticket_id: str) -> bool:
        """False if the decode side has taken the pages back: nothing may be written."""
        message = broker_pb2.FillRequest(ticket_id=ticket_id)
        reply = await self._quick("Fill", message, timeout_s=CALL_TIMEOUT_S)
        return not reply.taken_back

    async def unreserve(self, ticket_id: str) -> bool:
        """True if nobody writes to the ticket's pages, or will before it has asked for pages again."""
        message = broker_pb2.UnreserveRequest(ticket_id=ticket_id)
        reply = await self._call("Unreserve", message, timeout_s=UNRESERVE_TIMEOUT_S)
        return bool(reply.accepted)

    async def fail_ticket(self, ticket_id: str, reason: str, *, quiescent: bool = False) -> None:
        message = broker_pb2.FailTicketRequest(ticket_id=ticket_id, reason=reason, quiescent=quiescent)
        await self._call("FailTicket", message, timeout_s=CALL_TIMEOUT_S)

    async def report_reaped(self, ref: InstanceRef, pp_rank: int | None) -> None:
        """The process of that stage is reaped; None: of every stage."""
        message = broker_pb2.ReapedReport(instance=ref_to_pb(ref), pp_rank=pp_rank)
        await self._call("ReportReaped", message, timeout_s=CALL_TIMEOUT_S)

    async def report_writer(self, report: broker_pb2.WriterReport) -> str:
        """Returns which start of the broker has taken note: one that comes after it has to be told again."""
        reply = await self._quick("ReportWriter", report, timeout_s=CALL_TIMEOUT_S)
        return str(reply.broker)

    async def _call(self, method: str, request: Message, *, timeout_s: float) -> Any:
        return await _of_ours(self.client.call(method, request, timeout_s=timeout_s))

    async def _quick(self, method: str, request: Message, *, timeout_s: float) -> Any:
        return await _of_ours(self.client.quick(method, request, timeout_s=timeout_s))


async def _of_ours(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except Unsupported as error:
        raise Unreachable(f"no broker answers there: {error}") from None
