"""Over gRPC: a real router whose heads compute a toy, and a real broker with two instances that have joined it. Every
call ends with a status that is true of a wrong input, or is answered; afterwards all invariants hold."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import grpc
from google.protobuf.message_factory import GetMessageClass

from stagemesh.services.router.generator import GENERATOR
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.inspect import INSPECT, InspectService
from stagemesh.shared.rpc.server import Server
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import fill
from tests.fuzz.targets.generate import open_tokenizer, request_of
from tests.fuzz.targets.wire_broker import open_broker
from tests.fuzz.targets.wire_calls import CALL_LIMIT_S, Caller, Refused, Send, bytes_of
from tests.support.toy_mesh import ToyMesh, toy_router

START_LIMIT_S: Final = 60.0


async def open_router(folder: Path, stack: AsyncExitStack) -> Send:
    open_tokenizer(folder / "model")
    mesh = ToyMesh()
    router = await stack.enter_async_context(toy_router(folder, folder / "model", mesh))
    subject = SimpleNamespace(
        check_integrity=router.check_integrity, held={"requests": 0}, gauges={}, describe=list, measure=list
    )
    server = Server({GENERATOR: router, INSPECT: InspectService(subject, Tracer("router"))})
    address = await server.start(f"unix:{folder}/router")
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
    call, generate = Caller(channel), GENERATOR.methods_by_name["Generate"]

    async def send(rng: Random) -> None:
        try:
            if rng.random() < 0.8:
                await call(generate, [_request(rng)])
            else:
                method = rng.choice([*GENERATOR.methods, *INSPECT.methods])
                await call(method, [bytes_of(rng, fill(rng, GetMessageClass(method.input_type)()))])
        finally:
            router.check_integrity()
            async with asyncio.timeout(CALL_LIMIT_S):
                await router.empty()

    return send


def _request(rng: Random) -> bytes:
    request = request_of(rng)
    if rng.random() < 0.4:
        wrong = fill(rng, generator_pb2.GenerateRequest())
        for field in wrong.DESCRIPTOR.fields:
            if rng.random() < 0.85:
                wrong.ClearField(field.name)
        request.MergeFrom(wrong)
    return bytes_of(rng, request)


def _over_grpc(prepare: Callable[[Path, AsyncExitStack], Coroutine[Any, Any, Send]]) -> Callable[[Path], Try]:
    """The servers live as long as the process that runs the inputs."""

    async def live(folder: Path, ready: asyncio.Future[Send]) -> None:
        async with AsyncExitStack() as stack:
            ready.set_result(await prepare(folder, stack))
            await asyncio.get_running_loop().create_future()

    def open_target(folder: Path) -> Try:
        loop = asyncio.new_event_loop()
        ready: asyncio.Future[Send] = loop.create_future()
        servers = loop.create_task(live(folder, ready))

        def close() -> None:
            servers.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(servers)
            loop.close()

        atexit.register(close)
        send = loop.run_until_complete(asyncio.wait_for(ready, START_LIMIT_S))
        return lambda rng: loop.run_until_complete(send(rng))

    return open_target


TARGETS: Final = (
    Target("grpc-router", 4, _over_grpc(open_router), (Refused,)),
    Target("grpc-broker", 4, _over_grpc(open_broker), (Refused,)),
)
