"""Calling the heads: one channel an epoch of an instance, and calls that are tried until the instance is gone."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from stagemesh.services.broker.ticket import Close, Commit, Ticket, Verify
from stagemesh.shared.codec.arrays import to_tuple
from stagemesh.shared.codec.mesh import request_to_pb
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import PeerLost
from stagemesh.shared.pb import instance_pb2, mesh_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial

INSTANCE = instance_pb2.DESCRIPTOR.services_by_name["Instance"]
CALL_TIMEOUT_S = 2.0
VERIFY_TIMEOUT_S = 30.0  # a gigabyte takes a second
MARGIN_S = 0.25  # the asker's deadline is later than the head's by this


class Heads:
    """Those that have joined."""

    def __init__(self, dial: Dial = PLAIN) -> None:
        self._dial = dial
        self._clients: dict[InstanceRef, Client] = {}

    def add(self, info: InstanceInfo) -> None:
        if info.ref not in self._clients:
            self._clients[info.ref] = Client(info.address, INSTANCE, dial=self._dial)

    async def remove(self, ref: InstanceRef) -> None:
        client = self._clients.pop(ref, None)
        if client is not None:
            await client.__aexit__(None, None, None)

    async def close(self) -> None:
        for ref in list(self._clients):
            await self.remove(ref)

    async def reserve(self, ticket: Ticket, timeout_s: float) -> tuple[int, ...]:
        request = instance_pb2.ReservePagesRequest(
            ticket_id=ticket.ticket_id,
            request=request_to_pb(ticket.request),
            prompt_tokens=ticket.prompt_tokens,
            max_tokens=ticket.max_tokens,
            epoch=ticket.decode.epoch,
        )
        client = self._client(ticket.decode)
        reply = await client.call("ReservePages", request, timeout_s=max(0.05, timeout_s - MARGIN_S))
        return to_tuple(reply.pages)

    async def commit(self, action: Commit) -> bool:
        ticket = action.ticket
        request = instance_pb2.CommitTicketRequest(ticket_id=ticket.ticket_id, epoch=ticket.decode.epoch)
        reply = await self._client(ticket.decode).quick("CommitTicket", request, timeout_s=CALL_TIMEOUT_S)
        return bool(reply.accepted)

    async def close_ticket(self, action: Close) -> bool:
        """True if a prefill head says that its stages have nothing in flight and never will."""
        request = instance_pb2.CloseTicketRequest(
            ticket_id=action.ticket.ticket_id,
            reason=action.ticket.reason,
            quiesced=action.quiesced,
            epoch=action.instance.epoch,
            lost=action.ticket.lost,
        )
        reply = await self._client(action.instance).call("CloseTicket", request, timeout_s=CALL_TIMEOUT_S)
        return bool(reply.quiescent)

    async def verify(self, action: Verify) -> str:
        """What is wrong with the KV that has arrived, in words; empty if it is what was sent."""
        ticket = action.ticket
        checks = [
            mesh_pb2.KvCheck(
                target_rank=check.span.target,
                layers=mesh_pb2.LayerRange(lo=check.layers.lo, hi=check.layers.hi),
                first_page=check.span.first,
                crcs=check.span.crcs,
            )
            for check in ticket.checks
        ]
        request = instance_pb2.VerifyPagesRequest(ticket_id=ticket.ticket_id, epoch=ticket.decode.epoch, checks=checks)
        reply = await self._client(ticket.decode).call("VerifyPages", request, timeout_s=VERIFY_TIMEOUT_S)
        return str(reply.error)

    async def read_out(self, ref: InstanceRef) -> None:
        """Every stage of `ref` has read what processes had sent that have ended."""
        request = instance_pb2.ReadOutRequest(epoch=ref.epoch)
        await self._client(ref).call("ReadOut", request, timeout_s=CALL_TIMEOUT_S)

    async def renew(self, ref: InstanceRef, reason: str) -> None:
        """`ref` is to drain and end; whoever started it starts it again."""
        request = instance_pb2.RenewRequest(epoch=ref.epoch, reason=reason)
        await self._client(ref).call("Renew", request, timeout_s=CALL_TIMEOUT_S)

    async def ask(self, ref: InstanceRef, method: str, message: Message, timeout_s: float) -> Any:
        """What an operator wants of a head."""
        return await self._client(ref).call(method, message, timeout_s=timeout_s)

    async def ask_stage(self, address: str, method: str, message: Message, timeout_s: float) -> Any:
        """What an operator wants of a stage, whether or not it hosts a head."""
        async with Client(address, INSTANCE, dial=self._dial) as client:
            return await client.call(method, message, timeout_s=timeout_s)

    def _client(self, ref: InstanceRef) -> Client:
        client = self._clients.get(ref)
        if client is None:
            raise PeerLost(f"{ref} is gone")
        return client
