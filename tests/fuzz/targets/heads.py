"""Whole sessions and calls to the heads of both roles, whose stages answer at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np

from stagemesh.services.decode.head import DecodeHead
from stagemesh.services.prefill.head import PrefillHead
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.core.commands import SAMPLE, Command, Ints
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.errors import Cancelled, ProtocolViolation, Rejected, Retryable
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import instance_pb2
from stagemesh.shared.rpc.broker import Reservation
from stagemesh.shared.rpc.errors import first_of_ours
from stagemesh.shared.stage.head import Head
from tests.fuzz.judge import Target, Try
from tests.fuzz.mutate import fill
from tests.support.instances import DECODE, PREFILL, instance_of

VOCAB: Final = 100
MAX_COMMANDS: Final = 60  # then the stages say nothing more
TICKETS: Final = ("", "t1", "t2", "t3")
SessionUp = instance_pb2.SessionUp


class Broker:
    """Gives the same pages to everybody, and knows every ticket."""

    async def reserve(self, ticket_id: str) -> Reservation:
        return Reservation(tuple(range(16)), instance_of("d", DECODE).stages)

    async def fill(self, ticket_id: str) -> bool:
        return True

    async def unreserve(self, ticket_id: str) -> bool:
        return True

    async def fail_ticket(self, ticket_id: str, reason: str, *, quiescent: bool = False) -> None: ...


class Stages:
    """All there is of an instance but its head."""

    def __init__(self, make: Callable[[Any, Any], Head], scheduler: Any, info: Any) -> None:
        self._sampled: dict[int, Ints] = {}
        self._commands = 0
        self.errors: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()
        executor = SimpleNamespace(
            sampled=lambda step, ids: None, forget_sampled_before=lambda step: None, steps_done=0
        )
        context = SimpleNamespace(
            info=info,
            log=Log(logging.getLogger("stagemesh.fuzz")),
            vocab_size=VOCAB,
            issue=self._issue,
            spawn=self._spawn,
            tracer=Tracer("x/0"),
            broker=Broker(),
            executor=executor,
        )
        self.head = make(cast("Any", context), scheduler)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    def _issue(self, command: Command) -> None:
        self._commands += 1
        if self._commands <= MAX_COMMANDS:
            asyncio.get_running_loop().call_soon(self._answer, command)

    def _answer(self, command: Command) -> None:
        try:
            if command.step is None:
                self.head.on_applied(command.number)
                return
            rows = command.step.rows
            self.head.on_result(command.step.number, np.where(rows[:, -1] & SAMPLE, 7, -1), {})
        except Exception as error:
            self.errors.append(error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)


def decode_stages() -> Stages:
    scheduler = DecodeScheduler(num_pages=16, page_size=4, num_microbatches=2, max_running=4, host_pages=8)
    return Stages(cast("Any", DecodeHead), scheduler, instance_of("d", DECODE))


def prefill_stages() -> Stages:
    scheduler = PrefillScheduler(num_pages=16, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1)
    return Stages(cast("Any", PrefillHead), scheduler, instance_of("p", PREFILL))


def message_of(rng: Random) -> SessionUp:
    """Right or nearly right, or of anything at all."""
    if rng.random() < 0.2:
        return cast("SessionUp", fill(rng, SessionUp()))
    request = instance_pb2.RequestRef(request_id=rng.choice("abc"), attempt=1)
    match rng.randrange(4):
        case 0:
            return SessionUp(first_token=SessionUp.FirstToken(request=request, token_id=rng.choice((5, 5, -1, VOCAB))))
        case 1:
            return SessionUp(abort=SessionUp.AbortSequence(request=request))
        case _:
            submit = right_submit(rng, request)
            if rng.random() < 0.5:
                wrong = fill(rng, SessionUp.Submit())
                for field in wrong.DESCRIPTOR.fields:
                    if rng.random() < 0.8 or field.name == "request":
                        wrong.ClearField(field.name)
                submit.MergeFrom(wrong)
            return SessionUp(submit=submit)


def right_submit(rng: Random, request: instance_pb2.RequestRef) -> SessionUp.Submit:
    count = rng.randrange(1, 20)
    return SessionUp.Submit(
        request=request,
        sampling=instance_pb2.Sampling(max_tokens=rng.randrange(1, 9), top_p=1.0),
        prompt_tokens=count,
        token_ids=to_bytes([rng.randrange(VOCAB) for _ in range(count)]),
        ticket_id=rng.choice(TICKETS),
        peer_instance="d",
    )


async def _messages(rng: Random) -> AsyncIterator[SessionUp]:
    yield SessionUp(open=SessionUp.Open(router="r", epoch=rng.choice((1, 1, 1, 1, 2))))
    for _ in range(rng.randrange(1, 8)):
        yield message_of(rng)
        for _ in range(rng.choice((0, 1, 5))):
            await asyncio.sleep(0)


async def _calls(rng: Random, head: Head) -> None:
    for _ in range(rng.randrange(4)):
        try:
            async with asyncio.timeout(0.001):
                await _call(rng, head)
        except (TimeoutError, Rejected, ProtocolViolation, Cancelled, Retryable):
            pass  # as a server would say


async def _call(rng: Random, head: Head) -> None:
    ticket_id, epoch = rng.choice(TICKETS), rng.choice((1, 1, 1, 0))
    match rng.randrange(5):
        case 0:
            setting = rng.choice(("schedule_conservativeness", "x"))
            head.adjust(setting, rng.choice((1.0, -1.0, 1e300, float("nan"))))
        case 1:
            request = instance_pb2.RequestRef(request_id=rng.choice("abc"), attempt=1)
            asked = instance_pb2.ReservePagesRequest(ticket_id=ticket_id, request=request, epoch=epoch)
            await head.ReservePages(asked, None)
        case 2:
            await head.CommitTicket(instance_pb2.CommitTicketRequest(ticket_id=ticket_id, epoch=epoch), None)
        case 3:
            closed = instance_pb2.CloseTicketRequest(ticket_id=ticket_id, epoch=epoch, quiesced=True)
            await head.CloseTicket(closed, None)
        case _:
            head.flush_cache()


async def _session(rng: Random, stages: Stages) -> None:
    async def write(message: instance_pb2.SessionDown) -> None: ...

    head = stages.head
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(head.serve_session(_messages(rng), SimpleNamespace(write=write)))
            group.create_task(_calls(rng, head))
    finally:
        for _ in range(30):
            await asyncio.sleep(0)
        await stages.close()
        head.check_integrity()
        for error in stages.errors:  # it has ended the instance
            raise AssertionError("the instance dies") from error


def _of(make: Callable[[], Stages]) -> Callable[[Path], Try]:
    async def run(rng: Random) -> None:
        await _session(rng, make())

    def prepare(folder: Path) -> Try:
        runner = asyncio.Runner()

        def attempt(rng: Random) -> None:
            try:
                runner.run(run(rng))
            except ExceptionGroup as error:
                raise first_of_ours(error) from None

        return attempt

    return prepare


ERRORS: Final = (Rejected, ProtocolViolation)
TARGETS: Final = (
    Target("prefill-head", 6, _of(prefill_stages), ERRORS),
    Target("decode-head", 8, _of(decode_stages), ERRORS),
)
