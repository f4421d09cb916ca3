"""The stream between this router and one head: requests up, a step's outputs down.

opening --stream is up--> up --end of stream--> down: the instance is lost to every request that runs there

Only a submit can be refused for want of room: what follows it is two messages at most, so the queue stays bounded, and
an abort always reaches the head.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol

from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.codec.commands import sampling_to_pb
from stagemesh.shared.codec.mesh import request_to_pb
from stagemesh.shared.codec.session import output_from_pb
from stagemesh.shared.core.directory import InstanceInfo
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceOutput
from stagemesh.shared.errors import Exhausted, StagemeshError
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.rpc.errors import first_of_ours

INSTANCE = instance_pb2.DESCRIPTOR.services_by_name["Instance"]
PULSE_S = 0.5
BROKEN = "the connection to it has broken"
MAX_QUEUED = 20_000  # messages; a head that is so far behind gets no more requests


class Receiver(Protocol):
    """Who takes the outputs of a request."""

    def on_output(self, output: SequenceOutput) -> None: ...

    def on_lost(self, instance: InstanceRef, reason: str) -> None:
        """The stream has ended: nothing more comes from there."""
        ...


class HeadSession:
    """`spawn` puts the session's task under the router's supervisor; `on_up` is called when requests can be sent."""

    def __init__(
        self,
        info: InstanceInfo,
        router: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        log: Log,
        on_up: Callable[[], None],
        dial: Dial = PLAIN,
    ) -> None:
        self._dial = dial
        self.ref, self._router, self._on_up = info.ref, router, on_up
        self._address = info.address
        self._log = log.bind(instance_name=info.ref.name, instance_epoch=info.ref.epoch)
        self._outgoing: asyncio.Queue[instance_pb2.SessionUp] = asyncio.Queue()
        self._closed, self._why_closed = asyncio.Event(), "its session has ended"
        self._receivers: dict[RequestRef, Receiver] = {}
        self.up = self.ended = False
        self._made_s = time.monotonic()
        spawn(self._run())

    @property
    def num_requests(self) -> int:
        return len(self._receivers)

    def submit(
        self,
        receiver: Receiver,
        request: RequestRef,
        sampling: SamplingParams,
        *,
        prompt_tokens: int,
        token_ids: list[int],
        ticket_id: str,
        peer: InstanceRef | None = None,
        priority: int = 0,
        waited_s: float = 0.0,
        recompute: bool = False,
    ) -> None:
        """From now on `receiver` gets the outputs, the last one with an `end`. `waited_s` is since the request came,
        `peer` the other leg of its ticket.
        Raises Exhausted if the head is far behind."""
        if self._outgoing.qsize() >= MAX_QUEUED:
            raise Exhausted(f"{self.ref} takes no more requests: it has {MAX_QUEUED} messages to read")
        submit = instance_pb2.SessionUp.Submit(
            request=request_to_pb(request),
            sampling=sampling_to_pb(sampling),
            prompt_tokens=prompt_tokens,
            token_ids=to_bytes(token_ids),
            ticket_id=ticket_id,
            peer_instance="" if peer is None else peer.name,
            peer_epoch=0 if peer is None else peer.epoch,
            priority=priority,
            waited_s=waited_s,
            recompute=recompute,
        )
        self._outgoing.put_nowait(instance_pb2.SessionUp(submit=submit))
        self._receivers[request] = receiver

    def first_token(self, request: RequestRef, token_id: int) -> None:
        if request in self._receivers:
            first = instance_pb2.SessionUp.FirstToken(request=request_to_pb(request), token_id=token_id)
            self._outgoing.put_nowait(instance_pb2.SessionUp(first_token=first))

    def abort(self, request: RequestRef) -> None:
        """Nothing more of this request is wanted. A no-op once it has ended."""
        if self._receivers.pop(request, None) is not None and self.up:
            abort = instance_pb2.SessionUp.AbortSequence(request=request_to_pb(request))
            self._outgoing.put_nowait(instance_pb2.SessionUp(abort=abort))

    def describe(self, now_s: float) -> Entry:
        """For a dump. `now_s` is CLOCK_MONOTONIC."""
        state = "up" if self.up else "ended" if self.ended else "connecting"
        waits_for, on = ("", ()) if self.up else ("the head to answer", (self.ref.name,))
        details = {"requests": len(self._receivers), "messages_queued": self._outgoing.qsize()}
        return Entry("session", str(self.ref), now_s - self._made_s, state, waits_for, on, details)

    def close(self) -> None:
        """The instance has left the directory: its requests lose it now, whether or not it still reads."""
        self.up, self._why_closed = False, "it is gone from the directory"  # why, the broker's events say
        self._closed.set()

    async def _run(self) -> None:
        reason = ""
        try:
            async with asyncio.TaskGroup() as group:
                talk = group.create_task(self._talk())
                await self._closed.wait()
                talk.cancel()  # whatever it waits for: a head that hangs neither answers nor reads
        except* StagemeshError as errors:
            reason = str(first_of_ours(errors))
        finally:
            self._lose_all(reason)

    async def _talk(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._closed.set)
            client = await stack.enter_async_context(Client(self._address, INSTANCE, dial=self._dial))
            stream = client.open("Session")
            stack.callback(stream.cancel)
            opening = instance_pb2.SessionUp.Open(router=self._router, epoch=self.ref.epoch)
            await stream.send(instance_pb2.SessionUp(open=opening))
            self.up = True
            self._on_up()
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(stream))
                await self._read(stream)
                writer.cancel()

    async def _write(self, stream: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(PULSE_S):
                    message = await self._outgoing.get()
            except TimeoutError:
                message = instance_pb2.SessionUp(pulse=instance_pb2.SessionUp.Pulse())
            await stream.send(message)

    async def _read(self, stream: Any) -> None:
        async for message in stream.receive():
            for output in map(output_from_pb, message.outputs):
                receiver = self._receivers.get(output.request)
                if output.end is not None:
                    self._receivers.pop(output.request, None)
                if receiver is not None:
                    receiver.on_output(output)

    def _lose_all(self, reason: str) -> None:
        """`reason`: what is wrong with the connection, if anything is."""
        self.up, self.ended = False, True
        receivers, self._receivers = self._receivers, {}
        if receivers:
            self._log.warning(
                "requests lose their instance", requests=len(receivers), reason=reason or self._why_closed
            )
        told = BROKEN if reason else self._why_closed  # addresses, and the library's words, are no client's business
        for receiver in receivers.values():
            receiver.on_lost(self.ref, f"{self.ref.name} is lost: {told}")
