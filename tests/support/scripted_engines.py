"""`python -m tests.support.scripted_engines CONFIG STREAMS PACE`: a broker, a prefill head and a decode head that
compute nothing; for measuring the router alone. Decode begins when STREAMS sequences are there and makes PACE steps a
second, or with 0 as many as a router takes.

Says `ready` on stdout and ends when its stdin does. Every step of decode is one message with a token for each live
sequence. Tokens are those of a text, so that they are as hard to decode as real ones.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.codec.mesh import instance_to_pb
from stagemesh.shared.config import Config, load_config
from stagemesh.shared.core.directory import PROTOCOL_VERSION, InstanceInfo, Manifest, Role
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.source import open_model
from stagemesh.shared.pb import broker_pb2, instance_pb2
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.loop import run
from tests.support.doubles import Partial

INSTANCE = instance_pb2.DESCRIPTOR.services_by_name["Instance"]
MAX_QUEUED: Final = 4  # steps made before the router has taken the one before
REPORT_INTERVAL_S: Final = 0.5
TEXT: Final = (
    "The lighthouse keeper wrote down the weather every evening: wind from the north-west, 7 °C, rain; two ships.\n"
    "On Sundays he added what the gulls did — naïve, perhaps, but nobody else kept count — and closed the book. 🌊\n"
)

Messages = AsyncIterator[instance_pb2.SessionUp]


class ScriptedBroker(Partial):
    """A directory of two instances that report again and again, as heads do."""

    def __init__(self, instances: list[InstanceInfo]) -> None:
        self._instances, self._tickets = instances, count()

    async def Watch(  # noqa: N802
        self, request: broker_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[broker_pb2.DirectoryUpdate]:
        changed = [instance_to_pb(info) for info in self._instances]
        yield broker_pb2.DirectoryUpdate(snapshot=True, changed=changed)
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            yield broker_pb2.DirectoryUpdate(changed=changed)

    async def OpenTicket(  # noqa: N802
        self, request: broker_pb2.OpenTicketRequest, context: Any
    ) -> broker_pb2.OpenTicketReply:
        return broker_pb2.OpenTicketReply(ticket_id=f"t{next(self._tickets)}")

    async def FailTicket(  # noqa: N802
        self, request: broker_pb2.FailTicketRequest, context: Any
    ) -> broker_pb2.FailTicketReply:
        return broker_pb2.FailTicketReply()


class PrefillScript(Partial):
    """The first token, at once."""

    def __init__(self, token_ids: list[int]) -> None:
        self._first = token_ids[-1]

    async def Session(self, messages: Messages, context: Any) -> AsyncIterator[instance_pb2.SessionDown]:  # noqa: N802
        async for message in messages:
            if message.HasField("submit"):
                output = instance_pb2.SequenceOutput(request=message.submit.request, token_ids=[self._first])
                if message.submit.sampling.max_tokens == 1:
                    output.end = instance_pb2.SEQUENCE_END_LENGTH
                yield instance_pb2.SessionDown(outputs=[output])


class DecodeScript(Partial):
    """A token for each live sequence, step after step."""

    def __init__(self, token_ids: list[int], num_streams: int, pace: float) -> None:
        self._token_ids, self._num_streams = token_ids, num_streams
        self._interval_s = 1.0 / pace if pace else 0.0

    async def Session(self, messages: Messages, context: Any) -> None:  # noqa: N802
        live = LiveSequences(self._token_ids, self._num_streams)
        steps: asyncio.Queue[instance_pb2.SessionDown] = asyncio.Queue(MAX_QUEUED)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._make(live, steps)), group.create_task(self._send(steps, context))]
            async for message in messages:
                live.take(message)
            for task in tasks:
                task.cancel()

    async def _make(self, live: LiveSequences, steps: asyncio.Queue[instance_pb2.SessionDown]) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            await live.complete.wait()
            await steps.put(live.step())
            due_s = max(due_s + self._interval_s, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _send(self, steps: asyncio.Queue[instance_pb2.SessionDown], context: Any) -> None:
        while True:
            await context.write(await steps.get())


class LiveSequences:
    """Those whose first token has come, with what is left to make. `complete` from when all are there to when all have
    ended."""

    def __init__(self, token_ids: list[int], num_streams: int) -> None:
        self._token_ids, self._num_streams = token_ids, num_streams
        self._wanted: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self.complete = asyncio.Event()

    def take(self, message: instance_pb2.SessionUp) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                request = message.submit.request
                self._attempts[request.request_id] = request.attempt
                self._wanted[request.request_id] = message.submit.sampling.max_tokens - 1
            case "first_token":
                request_id = message.first_token.request.request_id
                self._left[request_id] = self._wanted.pop(request_id)
            case "abort":
                self._wanted.pop(message.abort.request.request_id, None)
                self._left.pop(message.abort.request.request_id, None)
        self._note()

    def step(self) -> instance_pb2.SessionDown:
        made = instance_pb2.SessionDown()
        for shift, (request_id, left) in enumerate(list(self._left.items())):
            output = made.outputs.add()
            output.request.request_id, output.request.attempt = request_id, self._attempts[request_id]
            output.token_ids.append(self._token_ids[(shift + left) % len(self._token_ids)])
            self._left[request_id] = left - 1
            if left == 1:
                output.end = instance_pb2.SEQUENCE_END_LENGTH
                del self._left[request_id]
        self._note()
        return made

    def _note(self) -> None:
        if len(self._left) == self._num_streams:
            self.complete.set()
        elif not self._left:
            self.complete.clear()


def _info(name: str, role: Role, address: str, model: ModelConfig) -> InstanceInfo:
    manifest = Manifest(PROTOCOL_VERSION, "scripted", "float32", 16, 1, 1, 1, "memory", 1 << 20, model.max_context)
    return InstanceInfo(InstanceRef(name, 1), role, address, manifest, ())


async def serve(config: Config, num_streams: int, pace: float) -> None:
    source = open_model(config.model.spec)
    token_ids = source.tokenizer().encode(TEXT)
    (prefill,), (decode,) = config.of_role("prefill"), config.of_role("decode")
    instances = [
        _info(prefill.name, Role.PREFILL, prefill.stages[0], source.config),
        _info(decode.name, Role.DECODE, decode.stages[0], source.config),
    ]
    servers = {
        prefill.stages[0]: Server({INSTANCE: PrefillScript(token_ids)}),
        decode.stages[0]: Server({INSTANCE: DecodeScript(token_ids, num_streams, pace)}),
        config.broker.listen: Server({BROKER: ScriptedBroker(instances)}),
    }
    async with AsyncExitStack() as stack:
        for address, server in servers.items():
            await server.start(address)
            stack.push_async_callback(server.stop)
        print("ready", flush=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()


if __name__ == "__main__":
    run(serve(load_config(Path(sys.argv[1]), {}), int(sys.argv[2]), float(sys.argv[3])))
