"""The ring of an instance's stages: everything that is said inside an instance travels from rank to next rank.

rank 0 --command--> rank 1 --command--> ... --> last rank          each passes it on before it applies it
       --data_ready-->     --data_ready-->
       --applied-->        --applied-->          --result, applied, settled, copied--> rank 0, where the head is
       --pulse, of each stage, every half second-->

One stream a neighbour. A neighbour that says it leaves is being stopped, and the others follow; a stream that ends
without that, or is silent, is the loss of the instance: stages live and die as one. A ring of one stage has no streams:
it is its own neighbour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

from stagemesh.shared.codec.arrays import to_array, to_bytes
from stagemesh.shared.codec.commands import command_from_pb, command_to_pb, logprobs_from_pb, logprobs_to_pb
from stagemesh.shared.codec.mesh import progress_from_pb, progress_to_pb
from stagemesh.shared.core.commands import Command, Ints, RowLogprobs
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.errors import Exhausted, PeerLost, ProtocolViolation, StagemeshError
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.runtime.silence import LOOK_S, LOST_AFTER_S, Silence

STAGE_LINK = stage_pb2.DESCRIPTOR.services_by_name["StageLink"]
MAX_QUEUED = 10_000  # messages; the head's steps outstanding keep it far below


class RingListener(Protocol):
    """Who hears what comes round the ring: the stage's executor, and on rank 0 the head too."""

    def on_command(self, command: Command) -> None: ...

    def on_data_ready(self, step: int, num_tokens: int) -> None: ...

    def on_applied(self, number: int) -> None: ...

    def on_result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None: ...

    def on_settled(self, settled: stage_pb2.Settled) -> None: ...

    def on_copied(self, handle: int, pp_rank: int, *, restored: bool) -> None: ...

    def on_pulse(self, progress: StageProgress) -> None: ...

    def on_read_out(self, number: int) -> None: ...

    def on_verify(self, verify: stage_pb2.Verify) -> None: ...

    def on_answer(self, answer: stage_pb2.Answer) -> None: ...


def deliver(message: stage_pb2.RingMessage, listener: RingListener) -> None:
    """Raises ProtocolViolation for a message of a kind that this version does not know."""
    match message.WhichOneof("kind"):
        case "command":
            listener.on_command(command_from_pb(message.command))
        case "data_ready":
            listener.on_data_ready(message.data_ready.step, message.data_ready.num_tokens)
        case "applied":
            listener.on_applied(message.applied.number)
        case "result":
            logprobs = {row: logprobs_from_pb(said) for row, said in message.result.logprobs.items()}
            listener.on_result(message.result.step, to_array(message.result.token_ids), logprobs)
        case "settled":
            listener.on_settled(message.settled)
        case "copied":
            copied = message.copied
            listener.on_copied(copied.handle, copied.pp_rank, restored=copied.restored)
        case "pulse":
            listener.on_pulse(progress_from_pb(message.pulse))
        case "read_out":
            listener.on_read_out(message.read_out.number)
        case "verify":
            listener.on_verify(message.verify)
        case "answer":
            listener.on_answer(message.answer)
        case kind:
            raise ProtocolViolation(f"ring message of unknown kind {kind}")


class RingOut:
    """This stage's way to the next one. Sending never waits; `run` carries the messages."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[stage_pb2.RingMessage | None] = asyncio.Queue(MAX_QUEUED)
        self._leaving: stage_pb2.Leaving | None = None
        self._ended = asyncio.Event()

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def command(self, command: Command) -> None:
        self.forward(stage_pb2.RingMessage(command=command_to_pb(command)))

    def data_ready(self, step: int, num_tokens: int) -> None:
        self.forward(stage_pb2.RingMessage(data_ready=stage_pb2.DataReady(step=step, num_tokens=num_tokens)))

    def applied(self, number: int) -> None:
        self.forward(stage_pb2.RingMessage(applied=stage_pb2.Applied(number=number)))

    def result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None:
        told = {row: logprobs_to_pb(said) for row, said in logprobs.items()}
        result = stage_pb2.StepResult(step=step, token_ids=to_bytes(token_ids), logprobs=told)
        self.forward(stage_pb2.RingMessage(result=result))

    def settled(self, settled: stage_pb2.Settled) -> None:
        self.forward(stage_pb2.RingMessage(settled=settled))

    def copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        copied = stage_pb2.Copied(handle=handle, pp_rank=pp_rank, restored=restored)
        self.forward(stage_pb2.RingMessage(copied=copied))

    def pulse(self, progress: StageProgress) -> None:
        self.forward(stage_pb2.RingMessage(pulse=progress_to_pb(progress)))

    def read_out(self, number: int) -> None:
        self.forward(stage_pb2.RingMessage(read_out=stage_pb2.ReadOut(number=number)))

    def verify(self, verify: stage_pb2.Verify) -> None:
        self.forward(stage_pb2.RingMessage(verify=verify))

    def answer(self, answer: stage_pb2.Answer) -> None:
        self.forward(stage_pb2.RingMessage(answer=answer))

    def forward(self, message: stage_pb2.RingMessage | None) -> None:
        """Raises Exhausted if the next stage takes nothing any more."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            raise Exhausted("the next stage of the ring takes nothing any more") from None

    async def finish(self, next_role: str) -> None:
        """Ends the stream after what is queued, which tells the next stage that this is no loss, and what follows:
        nothing, or a life in `next_role`."""
        self._leaving = stage_pb2.Leaving(next_role=next_role)
        self.forward(None)
        await self._ended.wait()

    async def run(self, next_stage: Client) -> None:
        """A child of the stage, until `finish`. Raises PeerLost when the next stage is gone before."""
        stream = next_stage.open("Ring")
        try:
            while (message := await self._queue.get()) is not None:
                await stream.send(message)
            await stream.send(stage_pb2.RingMessage(leaving=self._leaving))
            await stream.finish()
        except StagemeshError as error:
            if self._leaving is None:
                raise PeerLost(f"the next stage of the ring is gone: {error}") from error
        finally:
            stream.cancel()
            self._ended.set()

    async def loop_back(self, listener: RingListener) -> None:
        """The same for a ring of one stage."""
        while (message := await self._queue.get()) is not None:
            deliver(message, listener)
        self._ended.set()


class RingIn:
    """The server's part: takes the previous stage's stream. `ended` is set when it ends, in whatever way."""

    def __init__(self, listener: RingListener) -> None:
        self._listener, self._silence = listener, Silence()
        self._connected = self._finished = False
        self._error: Exception | None = None  # of the listener
        self.next_role = ""  # once the previous stage has said that it begins anew
        self.ended = asyncio.Event()

    async def accept(self, messages: AsyncIterator[stage_pb2.RingMessage]) -> stage_pb2.RingClosed:
        """Raises ProtocolViolation for a second stream, or a message that does not fit."""
        if self._connected:
            raise ProtocolViolation("the ring has a previous stage already")
        self._connected = True
        try:
            async for message in messages:
                self._silence.heard()
                if message.HasField(
                    "leaving"
                ):  # a dead neighbour's stream may end as quietly as that of one that leaves
                    self._finished, self.next_role = True, message.leaving.next_role
                else:
                    self._deliver(message)
        finally:
            self.ended.set()
        return stage_pb2.RingClosed()

    def _deliver(self, message: stage_pb2.RingMessage) -> None:
        """The sender hears of an error, and so does `watch`: it is what this stage ends with."""
        try:
            deliver(message, self._listener)
        except Exception as error:
            self._error = error
            raise

    async def watch(self, on_finished: Callable[[str], None]) -> None:
        """A child of the stage. Calls `on_finished` with the next role, or "", when the previous stage has ended its
        stream; raises PeerLost when it is gone without that, or silent: its process hangs, though its socket lives.
        Raises what a message of it came to."""
        while not self.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.ended.wait()
            if self._connected and not self.ended.is_set() and self._silence.look():
                raise PeerLost(f"the previous stage of the ring has been silent for {LOST_AFTER_S:g} s")
        if self._error is not None:
            raise self._error
        if not self._finished:
            raise PeerLost("the previous stage of the ring is gone")
        on_finished(self.next_role)
