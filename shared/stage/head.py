"""What a head is to its stage, and the pump that both roles' heads share.

An event (a result, a message, a call) changes the scheduler at once; what follows from it is carried out once a turn
of the loop, so that several events make one poll. Nothing here awaits between reading and changing the scheduler.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagemesh.shared.core.commands import FLAGS, SAMPLE, Command, Ints, RowLogprobs, Step
from stagemesh.shared.core.directory import InstanceInfo, InstanceLoad
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.core.tickets import TicketLeg
from stagemesh.shared.engine.schedule.decode_settings import StepRoom
from stagemesh.shared.errors import Bug, Cancelled, ProtocolViolation, Rejected, Retryable
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import Sample
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import instance_pb2, stage_pb2
from stagemesh.shared.rpc.broker import BrokerClient
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.questions import Questions
from stagemesh.shared.stage.sessions import Sessions

INSTANCE = instance_pb2.DESCRIPTOR.services_by_name["Instance"]


@dataclass(frozen=True, slots=True)
class HeadContext:
    """What the stage gives its head once the ring is closed. `issue` puts a command on the ring; `spawn` starts a task
    under the stage's supervisor; `ask_read_out` and `ask_verify` put such a question on the ring, and to this
    stage."""

    info: InstanceInfo
    executor: StageExecutor
    issue: Callable[[Command], None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    broker: BrokerClient
    ask_read_out: Callable[[int], None]
    ask_verify: Callable[[stage_pb2.Verify], None]
    vocab_size: int
    tracer: Tracer
    log: Log
    room: StepRoom | None = None  # None: no stages, as in tests


class Head(ABC):
    """Implements the Instance service. One for each life of an instance."""

    def __init__(self, context: HeadContext) -> None:
        self._context = context
        self._epoch = context.info.ref.epoch
        self._sessions = Sessions(self, self._epoch, context.log)
        self._progress: dict[int, StageProgress] = {}
        self._joins = 0  # how often this instance has told a broker what it knows
        self._questions = Questions()
        self._pump_scheduled = self._closed = False
        self._idle = asyncio.Event()

    # -- what the ring brings --

    @abstractmethod
    def on_result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None: ...

    def _check_ids(self, step: Step | None, token_ids: Ints) -> None:
        """Raises Bug unless `step` came back with an id of the vocabulary for every row that samples, and -1 for the
        others: what a device's memory held before its time must not go on to a client as a token. None: the scheduler
        will say that it is not out."""
        if step is None:
            return
        if len(token_ids) != len(step.rows):
            raise Bug(f"step {step.number} of {len(step.rows)} rows came back with {len(token_ids)} ids")
        samples = (step.rows[:, FLAGS] & SAMPLE) != 0
        wrong = np.where(samples, (token_ids < 0) | (token_ids >= self._context.vocab_size), token_ids != -1)
        if wrong.any():
            raise Bug(
                f"step {step.number} came back with id {token_ids[wrong][0]} in a row that samples "
                f"{'one' if samples[wrong][0] else 'none'} of {self._context.vocab_size}"
            )

    @abstractmethod
    def on_applied(self, number: int) -> None: ...

    @abstractmethod
    def on_settled(self, settled: stage_pb2.Settled) -> None: ...

    @abstractmethod
    def on_copied(self, handle: int, pp_rank: int, *, restored: bool) -> None: ...

    def on_pulse(self, progress: StageProgress) -> None:
        self._progress[progress.pp_rank] = progress

    def on_answer(self, answer: stage_pb2.Answer) -> None:
        self._questions.answered(answer.number, answer.pp_rank, answer.error, answer.num_wrong)

    # -- what routers bring --

    @abstractmethod
    def on_submit(self, submit: instance_pb2.SessionUp.Submit) -> None: ...

    @abstractmethod
    def on_first_token(self, request: RequestRef, token_id: int) -> None: ...

    @abstractmethod
    def on_abort(self, request: RequestRef) -> None: ...

    async def serve_session(self, messages: Any, context: Any) -> None:
        """A router's stream, to its end."""
        await self._sessions.serve(messages, context)

    # -- what the broker brings --

    @abstractmethod
    async def ReservePages(  # noqa: N802
        self, request: instance_pb2.ReservePagesRequest, context: Any
    ) -> instance_pb2.ReservePagesReply: ...

    @abstractmethod
    async def CommitTicket(  # noqa: N802
        self, request: instance_pb2.CommitTicketRequest, context: Any
    ) -> instance_pb2.CommitTicketReply: ...

    @abstractmethod
    async def CloseTicket(  # noqa: N802
        self, request: instance_pb2.CloseTicketRequest, context: Any
    ) -> instance_pb2.CloseTicketReply: ...

    def tell_tickets(self) -> list[TicketLeg]:
        """All that is known here of tickets, for a broker that may be another than the one before. What that one has
        answered but nobody has looked at yet counts no more: see `_joins`."""
        self._joins += 1
        return self._legs()

    @abstractmethod
    def _legs(self) -> list[TicketLeg]: ...

    def on_joined(self, broker: str) -> None:  # noqa: B027 (decode heads have nothing to say)
        """The broker has taken this instance in; `broker` says which start of it that is."""

    async def ReadOut(  # noqa: N802
        self, request: instance_pb2.ReadOutRequest, context: Any
    ) -> instance_pb2.ReadOutReply:
        self._check_epoch(request.epoch)
        said = await self._questions.ask(len(self._context.info.stages), self._context.ask_read_out)
        if said.error:
            raise ProtocolViolation(said.error)
        return instance_pb2.ReadOutReply()

    async def VerifyPages(  # noqa: N802
        self, request: instance_pb2.VerifyPagesRequest, context: Any
    ) -> instance_pb2.VerifyPagesReply:
        raise ProtocolViolation(f"a {self._context.info.role.value} instance takes no KV")

    # -- what operators bring --

    def adjust(self, setting: str, value: float) -> float:
        """Changes a setting until the instance is started again. Returns what it was. Raises Rejected for a setting
        that there is not, or a value out of its limits."""
        raise Rejected("setting", f"{self._context.info.role.value} instances have none named {setting!r}")

    def flush_cache(self) -> int:
        """Evicts the cached pages that nobody uses, and returns how many. Raises Rejected where nothing is cached."""
        raise Rejected("instance", f"{self._context.info.role.value} instances cache no prompts")

    def close(self) -> None:
        """Nothing is taken from now on: what routers still send runs elsewhere. Raises Retryable if something is here,
        or may still be written to."""
        if held := ", ".join(f"{count} {what}" for what, count in self.held.items() if count):
            raise Retryable(f"there are {held}")
        self._closed = self._sessions.is_closed = True

    def _check_epoch(self, epoch: int) -> None:
        """Raises ProtocolViolation for a call that means an earlier life of this instance, Cancelled at the end of the
        one that it means."""
        if self._closed:
            raise Cancelled(f"{self._context.info.ref} has ended")
        if epoch != self._epoch:
            raise ProtocolViolation(f"epoch {epoch} is meant, this is {self._epoch}")

    # -- the pump --

    def wake(self) -> None:
        """Something has changed: carry out what follows, in this turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_pump)

    def _run_pump(self) -> None:
        self._pump_scheduled = False
        try:
            self.pump()
        except Exception as error:  # a callback's exception would only be logged: it must end the instance
            self._context.spawn(_fail(error))
        if not self.has_work:
            self._idle.set()

    @abstractmethod
    def pump(self) -> None:
        """Polls the scheduler and carries out its actions."""

    def _issue(self, commands: list[Command]) -> None:
        for command in commands:
            if command.step is not None:
                self._context.tracer.mark(
                    "issue", step=command.step.number, microbatch=command.step.microbatch, rows=len(command.step.rows)
                )
            self._context.issue(command)

    async def idle(self) -> None:
        """Returns when nothing is in flight, and routers are told all of it."""
        while self.has_work:
            self._idle.clear()
            await self._idle.wait()
        await self._sessions.written()

    # -- views --

    @property
    def progress(self) -> tuple[StageProgress, ...]:
        """Of each stage that has said so."""
        return tuple(self._progress.values())

    @property
    def has_work(self) -> bool:
        """Pages in quarantine wait for a proof from elsewhere, which may never come: that is no work."""
        return any(count for what, count in self.held.items() if what != "pages_quarantined")

    @property
    @abstractmethod
    def load(self) -> InstanceLoad: ...

    @property
    @abstractmethod
    def held(self) -> Mapping[str, int]: ...

    @property
    def gauges(self) -> Mapping[str, int]:
        """What else is worth a number to people."""
        return {}

    @abstractmethod
    def check_integrity(self) -> None: ...

    @abstractmethod
    def measure(self) -> Iterable[Sample]:
        """The numbers of the scheduler and of the sessions."""

    @abstractmethod
    def describe(self, now_s: float) -> Iterable[Entry]:
        """What its sequences and steps wait for. `now_s` is CLOCK_MONOTONIC."""


async def _fail(error: Exception) -> None:
    raise error
