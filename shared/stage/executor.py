"""Applies the commands of a stage: in order, exactly once, forward passes on one worker thread.

submit --> [inputs there?] --> apply + forward (worker) --> KV writes start, activations start --> next command

Inputs: on the first stage the ids that earlier steps have sampled; on the others the activations in the ring. A
command without a step that every earlier stage has applied is acknowledged onwards in order with everything else.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stagemesh.shared.core.commands import COUNT, HANDLE, START, Command, Ints, RowLogprobs, Step
from stagemesh.shared.engine.runner import StageRunner, StepOutput
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.link.ring import RingReceiver, RingSender
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.forward import ForwardThread
from stagemesh.shared.stage.kv_sender import KvSender
from stagemesh.shared.stage.occupancy import Activity, Occupancy
from stagemesh.shared.stage.step_clock import StepClock


class Onwards(Protocol):
    """The next stage of the ring; after the last stage, the head."""

    def data_ready(self, step: int, num_tokens: int) -> None: ...

    def result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None: ...

    def applied(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Errand:
    """Something else for the forward thread to do between two commands."""

    work: Callable[[], object]
    done: asyncio.Future[None]


class StageExecutor:
    """`receiver` is None on the first stage, `sender` on the last, `kv` on decode stages. `prepare_thread`
    is called once on the forward thread."""

    def __init__(
        self,
        runner: StageRunner,
        onwards: Onwards,
        *,
        receiver: RingReceiver | None,
        sender: RingSender | None,
        kv: KvSender | None,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        tracer: Tracer,
        prepare_thread: Callable[[], object] = int,
    ) -> None:
        self._runner, self._onwards = runner, onwards
        self._prepare_thread = prepare_thread
        self._receiver, self._sender, self._kv = receiver, sender, kv
        self._spawn, self._tracer = spawn, tracer
        self._is_first = receiver is None
        self._queue: asyncio.Queue[Command | int | Errand] = asyncio.Queue()  # bounded by the head's steps outstanding
        self._arrived: dict[int, int] = {}  # step -> its tokens in the ring
        self._sampled: dict[int, Ints] = {}  # step -> its ids, while a later step may point at them
        self._news = asyncio.Event()
        self._last_number = 0
        self.steps_done = self.hops_done = self.hop_ns = 0
        self.launch_s = 0.0  # from the latest step's command to its being enqueued on a device that computes by itself
        self.occupancy = Occupancy(time.monotonic_ns())
        self.clock = StepClock()
        self._command: Command | None = None  # that it is at
        self.step: Step | None = None  # that it runs, or whose inputs it waits for
        self.hops: dict[int, int] = {}  # step whose activations are on their way -> since when, in ns

    @property
    def gauges(self) -> Mapping[str, int]:
        """What a device adds to what every stage tells of itself."""
        return {}

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    @property
    def has_work(self) -> bool:
        """It is at a command, or will be at one next; an errand is its asker's business."""
        return self._command is not None or self.clock.running

    def submit(self, command: Command) -> None:
        """Raises ProtocolViolation if a number is missing or comes twice."""
        if command.number != self._last_number + 1:
            raise ProtocolViolation(f"command {command.number} follows {self._last_number}")
        self._last_number = command.number
        self._queue.put_nowait(command)
        if self.occupancy.activity is Activity.IDLE:
            self.occupancy.move(Activity.STARVED, time.monotonic_ns())

    def data_ready(self, step: int, num_tokens: int) -> None:
        self._arrived[step] = num_tokens
        self._news.set()

    def sampled(self, step: int, token_ids: Ints) -> None:
        """First stage: the ids of a step are known."""
        self._sampled[step] = token_ids
        self._news.set()

    def forget_sampled_before(self, step: int) -> None:
        """First stage: no step to come points at one before `step`."""
        for number in [number for number in self._sampled if number < step]:
            del self._sampled[number]

    def upstream_applied(self, number: int) -> None:
        """Every stage before this one has applied the commands up to `number`, which are all in the queue."""
        self._queue.put_nowait(number)

    def release(self) -> None:
        """It has run its last step."""
        if self._sender is not None:
            self._sender.close()

    async def between_steps(self, work: Callable[[], object]) -> None:
        """Runs `work` on the forward thread, when the commands before it are through. Raises what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(Errand(work, done))
        await done

    async def run(self) -> None:
        """A child of the stage: runs until cancelled."""
        thread = ForwardThread(self._prepare_thread)
        try:
            while True:
                await self._take(await self._queue.get(), thread)
                self._rest()
        finally:
            await thread.close()

    async def _take(self, item: Command | int | Errand, thread: ForwardThread) -> None:
        if isinstance(item, int):
            self._onwards.applied(item)
        elif isinstance(item, Errand):
            await self._run_errand(item, thread)
        else:
            self._command = item
            await self._run_command(item, thread)
            self._command = None

    async def _run_command(self, command: Command, thread: ForwardThread) -> None:
        if command.step is not None:
            await self._run_step(command, command.step, thread)
            return
        await thread.call(lambda: self._runner.apply(command))
        self._after(command)
        if self._is_first:
            self._onwards.applied(command.number)

    async def _run_errand(self, errand: Errand, thread: ForwardThread) -> None:
        try:
            await thread.call(errand.work)
        except Exception as error:  # it is the asker's, not the stage's
            if not errand.done.done():
                errand.done.set_exception(error)
        else:
            if not errand.done.done():
                errand.done.set_result(None)

    def _rest(self) -> None:
        """Nothing is being run. Commands and residents mean work, if not for this stage now."""
        has_work = self._queue.qsize() or self._runner.num_residents
        self.occupancy.move(Activity.STARVED if has_work else Activity.IDLE, time.monotonic_ns())

    async def _run_step(self, command: Command, step: Step, thread: ForwardThread) -> None:
        self.step, asked_ns = step, time.monotonic_ns()
        hidden = await self._inputs(step)
        start_ns = time.monotonic_ns()
        self.occupancy.move(Activity.FORWARD, start_ns)
        self.clock.begin(step.num_tokens, start_ns / 1e9)
        output = await thread.call(lambda: self._execute(command, step, hidden))
        self.clock.end(time.monotonic())
        self.step = None
        self._rest()
        self._tracer.span(
            "forward",
            start_ns,
            step=step.number,
            microbatch=step.microbatch,
            rows=len(step.rows),
            tokens=step.num_tokens,
            waited_ns=start_ns - asked_ns,
        )
        self.steps_done += 1
        self._after(command)
        self._tracer.requests.ran(step, start_ns)
        if self._sender is None:
            self._onwards.result(step.number, output.tensor.numpy(), output.logprobs)
        else:
            self._spawn(self._transmit(self._sender, step))

    @property
    def missing_ids(self) -> frozenset[int]:
        """First stage: the steps whose ids the next step waits for."""
        return frozenset() if self.step is None else self.step.source_steps - self._sampled.keys()

    async def _inputs(self, step: Step) -> Tensor | None:
        if self._receiver is None:
            while not step.source_steps <= self._sampled.keys():
                await self._wait_for_news()
            return None
        while step.number not in self._arrived:
            await self._wait_for_news()
        return self._receiver.view(step.number, self._arrived.pop(step.number))

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _execute(self, command: Command, step: Step, hidden: Tensor | None) -> StepOutput:
        """On the worker thread."""
        self._runner.apply(command)
        output = self._runner.run(step, hidden=hidden, sampled=self._sampled)
        if self._sender is not None:
            self._sender.stage(step.number, output.tensor)
        return output

    async def _transmit(self, sender: RingSender, step: Step) -> None:
        start_ns = self.hops[step.number] = time.monotonic_ns()
        await sender.transmit(step.number).wait()
        end_ns = time.monotonic_ns()
        self._tracer.span("hop", start_ns, end_ns, step=step.number)
        del self.hops[step.number]
        self.hops_done, self.hop_ns = self.hops_done + 1, self.hop_ns + end_ns - start_ns
        self._onwards.data_ready(step.number, step.num_tokens)

    def _after(self, command: Command) -> None:
        """The KV of a step is in the pool: what is complete begins to travel."""
        self._tracer.requests.applied(command)
        if self._kv is None:
            return
        for join in command.joins:
            if join.send is not None:
                self._kv.join(join.handle, join.send)
        if command.step is not None:
            self._progressed(command.step, self._pages_of(command.step))
        for handle in command.cancels:
            self._kv.cancel(handle)

    def _pages_of(self, step: Step) -> list[list[int]]:
        """Of each row of a step that has just been run, or enqueued; nothing where no KV is sent."""
        return [] if self._kv is None else [self._runner.pages_of(handle) for handle in step.rows[:, HANDLE].tolist()]

    def _progressed(self, step: Step, pages: list[list[int]]) -> None:
        """The KV of `step` is in the pool, in `pages` of its rows."""
        if self._kv is not None:
            for row, own in zip(step.rows.tolist(), pages, strict=True):
                self._kv.progressed(row[HANDLE], own, row[START] + row[COUNT])


def yield_cores(nice: int) -> None:
    """Lowers the priority of this thread alone, and of the threads that computing starts from it: never the loop's.
    `nice` is 0..19."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
