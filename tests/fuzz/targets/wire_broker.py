"""A real broker with two instances that have joined it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from stagemesh.services.broker.service import BrokerService
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.codec.mesh import instance_from_pb, instance_to_pb, ref_to_pb
from stagemesh.shared.config import build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2, calls_pb2, instance_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.calls import CALLS
from stagemesh.shared.rpc.inspect import INSPECT
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.stage.head import INSTANCE
from tests.fuzz.mutate import fill
from tests.fuzz.targets.wire_calls import CALL_LIMIT_S, Caller, Send, bytes_of, check_reply
from tests.support.doubles import Partial
from tests.support.instances import DECODE, PREFILL, instance_of

OPEN_TICKETS: Final = 8


class Head(Partial):
    """An instance that agrees to everything."""

    QUICK: ClassVar = frozenset({"CommitTicket"})

    async def ReservePages(self, request: instance_pb2.ReservePagesRequest, context: Any) -> Any:  # noqa: N802
        return instance_pb2.ReservePagesReply(pages=to_bytes([1, 2]))

    async def CommitTicket(self, request: instance_pb2.CommitTicketRequest, context: Any) -> Any:  # noqa: N802
        return instance_pb2.CommitTicketReply(accepted=True)

    async def CloseTicket(self, request: instance_pb2.CloseTicketRequest, context: Any) -> Any:  # noqa: N802
        return instance_pb2.CloseTicketReply(quiescent=True)


class BrokerCase:
    """The broker under test, and tickets of its that calls may name."""

    def __init__(self, broker: BrokerService, call: Caller, infos: tuple[InstanceInfo, InstanceInfo]) -> None:
        self._broker, self._call, self._infos = broker, call, infos
        self._tickets: list[str] = []

    async def send(self, rng: Random) -> None:
        method = rng.choice([*BROKER.methods, *BROKER.methods, *CALLS.methods, *CALLS.methods, *INSPECT.methods])
        count = rng.randrange(1, 4) if method.client_streaming else 1
        messages = [bytes_of(rng, self._message(rng, method)) for _ in range(count)]
        try:
            for answer in await self._call(method, messages):
                if isinstance(answer, broker_pb2.OpenTicketReply):
                    self._tickets = [*self._tickets, answer.ticket_id][-OPEN_TICKETS:]
                elif isinstance(answer, calls_pb2.CallReply) and answer.code:
                    check_reply(answer)
        finally:
            self._broker.check_integrity()

    def _quick(self, rng: Random) -> calls_pb2.Call:
        """Mostly of a method that may be called so, with a message that it takes."""
        method = BROKER.methods_by_name[rng.choice(("Fill", "ReportWriter", "ReportWriter", "OpenTicket"))]
        call: calls_pb2.Call = fill(rng, calls_pb2.Call())
        if rng.random() < 0.9:
            call.method = method.name
        if rng.random() < 0.9:
            call.request = bytes_of(rng, self._message(rng, method))
        if rng.random() < 0.9:
            call.timeout_s = CALL_LIMIT_S
        return call

    def _message(self, rng: Random, method: MethodDescriptor) -> Any:
        if method.name == "CallStream":
            return self._quick(rng)
        message: Any = fill(rng, GetMessageClass(method.input_type)())
        fields = message.DESCRIPTOR.fields_by_name
        if rng.random() < 0.2:
            return message
        prefill, decode = self._infos
        if "ticket_id" in fields and self._tickets:
            message.ticket_id = rng.choice(self._tickets)
        match method.name:
            case "OpenTicket":
                message.prefill.CopyFrom(ref_to_pb(prefill.ref))
                message.decode.CopyFrom(ref_to_pb(decode.ref))
                if rng.random() < 0.7:
                    message.prompt_tokens, message.max_tokens = 8, 4
            case "ReportWriter":
                message.instance.CopyFrom(ref_to_pb(prefill.ref))
                message.pp_rank = rng.choice((0, 1, 0, 1, 2, 1 << 31))
                for target in range(rng.randrange(3)):
                    message.pieces.add(target_rank=target, first_page=0, last_page=rng.choice((2, 2, 1, (1 << 32) - 1)))
            case "Join":
                self._make_right(rng, message.info)
        return message

    def _make_right(self, rng: Random, info: Any) -> None:
        """As a head would report itself, but for some fields. Never one of those that are there."""
        role = rng.choice((PREFILL, DECODE))
        right = instance_to_pb(instance_of(f"other-{rng.randrange(3)}", role, epoch=rng.randrange(3)))
        for name in (field.name for field in info.DESCRIPTOR.fields):
            if rng.random() < 0.9 or name == "name":
                info.ClearField(name)
        right.MergeFrom(info)
        info.CopyFrom(right)


async def open_broker(folder: Path, stack: AsyncExitStack) -> Send:
    document = {**local_document(LocalLayout(), folder), "metrics": {"enabled": False}}
    config = build_config(document, source="the test", environ={})
    broker = BrokerService(config, Notifier(None), Log(logging.getLogger("stagemesh.fuzz")))
    children = await broker.start(stack)
    group = await stack.enter_async_context(asyncio.TaskGroup())
    for work in children:
        stack.callback(group.create_task(work).cancel)
    for head in ("p", "d"):
        server = Server({INSTANCE: Head()})
        await server.start(f"unix:{folder}/{head}")
        stack.push_async_callback(server.stop)
    assert broker.address is not None
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(broker.address))
    infos = (_at(folder, "p"), _at(folder, "d"))
    for info in infos:
        stack.callback(group.create_task(_report(channel, info)).cancel)
    case = BrokerCase(broker, Caller(channel), infos)
    await _joined(channel, len(infos))
    return case.send


async def _joined(channel: grpc.aio.Channel, count: int) -> None:
    """Returns when so many instances are there."""
    watch = channel.unary_stream("/stagemesh.v1.Broker/Watch", request_serializer=bytes, response_deserializer=bytes)
    seen, call = set[str](), watch(b"")
    async for data in call:
        seen |= {info.name for info in broker_pb2.DirectoryUpdate.FromString(data).changed}
        if len(seen) == count:
            call.cancel()
            return


def _at(folder: Path, name: str) -> InstanceInfo:
    info = instance_of(name, PREFILL if name == "p" else DECODE)
    message = instance_to_pb(info)
    message.address = f"unix:{folder}/{name}"
    return instance_from_pb(message)


async def _report(channel: grpc.aio.Channel, info: InstanceInfo) -> None:
    """An instance that is there until the end."""

    async def reports() -> AsyncIterator[bytes]:
        while True:
            yield broker_pb2.InstanceReport(info=instance_to_pb(info)).SerializeToString()
            await asyncio.sleep(0.5)

    join = channel.stream_stream("/stagemesh.v1.Broker/Join", request_serializer=bytes, response_deserializer=bytes)
    async for _ in join(reports()):
        pass
