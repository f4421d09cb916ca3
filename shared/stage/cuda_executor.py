"""The executor of a stage on a GPU: enqueues every step as soon as its command is there, and hears of it when the
device is through.

submit --> [forward thread: apply, enqueue] --> next command, at once
               device: wait for inputs -> forward -> hand on    ...    --> [completion thread] --> result, KV writes

Steps wait for each other on the devices alone: activations and sampled ids lie in rings of the stages' GPUs. So the
host runs ahead as far as the head issues commands. KV writes of a chunk begin when its event has come, not before.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stagemesh.shared.core.commands import COUNT, HANDLE, START, Command, RowLogprobs, Step
from stagemesh.shared.engine.cuda_runner import CudaStageRunner
from stagemesh.shared.link.cuda_ring import DeviceInbox, DeviceOutbox
from stagemesh.shared.link.ring import RingSpec
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.cuda_parts import DeviceParts
from stagemesh.shared.stage.executor import Onwards, StageExecutor
from stagemesh.shared.stage.forward import ForwardThread
from stagemesh.shared.stage.kv_sender import KvSender
from stagemesh.shared.stage.occupancy import Activity
from stagemesh.shared.stage.parts import StageParts


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device. `begun` and `done` frame what it computes; `ids` is pinned, and there once `done` is."""

    begun: torch.cuda.Event
    done: torch.cuda.Event
    ids: Tensor | None
    logprobs: RowLogprobs
    launch_ns: int


class CudaStageExecutor(StageExecutor):
    """`inbox`: activations from the previous stage or, on the first decode stage, ids from the last one. `outbox`: the
    next stage's inbox; on the last decode stage the first one's; None on the last prefill stage."""

    def __init__(
        self,
        runner: CudaStageRunner,
        onwards: Onwards,
        *,
        stream: torch.cuda.Stream,
        inbox: DeviceInbox | None,
        outbox: DeviceOutbox | None,
        first: bool,
        last: bool,
        hidden_size: int,
        kv: KvSender | None,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        tracer: Tracer,
    ) -> None:
        super().__init__(
            runner,
            onwards,
            receiver=None,
            sender=None,
            kv=kv,
            spawn=spawn,
            tracer=tracer,
            prepare_thread=partial(torch.cuda.set_stream, stream),
        )
        self._is_first = first
        self._cuda_runner, self._stream = runner, stream
        self._inbox, self._outbox = inbox, outbox
        self._first, self._last, self._hidden_size = first, last, hidden_size
        self._in_flight = 0
        self._idle_event: torch.cuda.Event | None = None
        self.busy_ms = self.idle_ms = 0.0  # between the first and the last step, by the device's clock
        self.launch_ns = 0

    def release(self) -> None:
        if self._outbox is not None:
            self._outbox.close()

    @property
    def gauges(self) -> Mapping[str, int]:
        """By the device's clock: time in steps, and time between the end of one and the inputs of the next. By the
        host's: time to enqueue steps."""
        return {
            "gpu_busy_us": round(self.busy_ms * 1e3),
            "gpu_idle_us": round(self.idle_ms * 1e3),
            "launch_us": self.launch_ns // 1000,
        }

    async def run(self) -> None:
        completions = self._completions = Completions(asyncio.get_running_loop(), self._fail)
        try:
            await super().run()
        finally:
            completions.close()

    def _fail(self, error: Exception) -> None:
        """A callback's exception would only be logged: it must end the stage."""
        self._spawn(_raise(error))

    async def _run_step(self, command: Command, step: Step, thread: ForwardThread) -> None:
        self.step = step
        self._in_flight += 1
        self.occupancy.move(Activity.FORWARD, time.monotonic_ns())
        self.clock.begin(step.num_tokens, time.monotonic())
        launched = await thread.call(lambda: self._launch(command, step))
        self.step = None
        self._begin_kv(command)
        self._completions.expect(launched, lambda end_ns: self._completed(step, launched, end_ns))

    def _rest(self) -> None:
        if not self._in_flight:
            super()._rest()

    def _launch(self, command: Command, step: Step) -> Launched:
        """On the forward thread."""
        start_ns = time.monotonic_ns()
        self._runner.apply(command)
        begun, done = _event(), _event()
        forward = self._cuda_runner.prepare(step)
        hidden = self._await_inputs(step)
        begun.record(self._stream)
        output = forward(hidden)
        if self._outbox is not None:
            self._outbox.send(self._stream, step.number, output.tensor)
        ids = None
        if self._last:
            ids = torch.empty(len(step.rows), dtype=torch.int64, pin_memory=True)
            ids.copy_(output.tensor, non_blocking=True)
        done.record(self._stream)
        return Launched(begun, done, ids, output.logprobs, time.monotonic_ns() - start_ns)

    def _await_inputs(self, step: Step) -> Tensor | None:
        """Lets the stream wait for what the step needs. Returns a chunk's activations; decode's graphs know theirs."""
        if self._inbox is None:
            return None
        if self._first:
            if sources := step.source_steps:
                self._inbox.wait(self._stream, max(sources))
            return None
        self._inbox.wait(self._stream, step.number)
        width = self._hidden_size * self._cuda_runner.dtype.itemsize
        taken = self._inbox.slot(step.number)[: step.num_tokens * width]
        return taken.view(self._cuda_runner.dtype).view(step.num_tokens, self._hidden_size)

    def _begin_kv(self, command: Command) -> None:
        """Cancels may overtake the steps that are on the device, joins must not be overtaken by them."""
        self._tracer.requests.applied(command)
        if self._kv is None:
            return
        for join in command.joins:
            if join.send is not None:
                self._kv.join(join.handle, join.send)
        for handle in command.cancels:
            self._kv.cancel(handle)

    def _after(self, command: Command) -> None:
        if command.step is None:
            self._begin_kv(command)

    def _completed(self, step: Step, launched: Launched, end_ns: int) -> None:
        """On the loop: the device has been through with the step since `end_ns`."""
        self._in_flight -= 1
        self.clock.end(time.monotonic())
        self.steps_done += 1
        busy_ms = launched.begun.elapsed_time(launched.done)
        self.busy_ms += busy_ms
        if self._idle_event is not None:
            self.idle_ms += self._idle_event.elapsed_time(launched.begun)
        self._idle_event = launched.done
        self.launch_ns += launched.launch_ns
        self._rest()
        start_ns = end_ns - round(busy_ms * 1e6)
        self._tracer.span(
            "forward",
            start_ns,
            end_ns,
            step=step.number,
            microbatch=step.microbatch,
            rows=len(step.rows),
            tokens=step.num_tokens,
            launch_ns=launched.launch_ns,
        )
        self._tracer.requests.ran(step, start_ns)
        if self._kv is not None:
            for row in step.rows.tolist():
                self._kv.progressed(row[HANDLE], self._runner.pages_of(row[HANDLE]), row[START] + row[COUNT])
        if launched.ids is not None:
            self._onwards.result(step.number, launched.ids.numpy(), launched.logprobs)


def make_cuda_executor(
    parts: StageParts,
    device: DeviceParts,
    spec: RingSpec | None,
    onwards: Onwards,
    kv: KvSender | None,
    spawn: Callable[[Coroutine[Any, Any, None]], object],
    tracer: Tracer,
) -> CudaStageExecutor:
    """`spec` is the next stage's inbox. Ids of a decode stage that is alone go into its own."""
    assert isinstance(parts.runner, CudaStageRunner)
    outbox = None
    if spec is not None:
        outbox = DeviceOutbox(spec)
    elif parts.first and parts.last and device.inbox is not None:
        outbox = DeviceOutbox(device.inbox.spec, local=device.inbox)
    return CudaStageExecutor(
        parts.runner,
        onwards,
        stream=device.stream,
        inbox=device.inbox,
        outbox=outbox,
        first=parts.first,
        last=parts.last,
        hidden_size=parts.config.hidden_size,
        kv=kv,
        spawn=spawn,
        tracer=tracer,
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


class Completions:
    """A thread that waits for the device, event after event, and calls the loop back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fail: Callable[[Exception], None]) -> None:
        self._loop, self._fail = loop, fail
        self._queue: queue.SimpleQueue[tuple[Launched, Callable[[int], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="completions", daemon=True)
        self._thread.start()

    def expect(self, launched: Launched, then: Callable[[int], None]) -> None:
        """`then` is called on the loop, with when (CLOCK_MONOTONIC, ns) the device was seen to be through, in the order
        of calls of this. Bounded by the head's steps outstanding."""
        self._queue.put((launched, then))

    def close(self) -> None:
        """Does not wait: a stage whose peers are gone may have steps on the device that never end."""
        self._queue.put(None)

    def _wait(self) -> None:
        while (expected := self._queue.get()) is not None:
            launched, then = expected
            try:
                launched.done.synchronize()
            except Exception as error:  # whatever the device has to say
                self._tell(partial(self._fail, error))
                return
            self._tell(partial(self._call, then, time.monotonic_ns()))

    def _call(self, then: Callable[[int], None], end_ns: int) -> None:
        try:
            then(end_ns)
        except Exception as error:
            self._fail(error)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what)


async def _raise(error: Exception) -> None:
    raise error
