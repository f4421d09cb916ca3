"""The executor of a stage on a GPU: enqueues every step as soon as its command is there, and hears of it when the
device is through.

submit --> [forward thread: apply, enqueue] --> next command, at once
               device: wait for inputs -> forward -> the next step's inputs ...
                                             `-> hand on, beside it     --> [completion thread] --> result, KV writes

Steps wait for each other on the devices alone: activations and sampled ids lie in rings of the stages' GPUs. So the
host runs ahead as far as the head issues commands. KV writes of a chunk begin when its event has come, not before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from stagemesh.shared.core.commands import Command, Step
from stagemesh.shared.link.cuda_ring import DeviceInbox, DeviceOutbox
from stagemesh.shared.link.ring import RingSpec
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.completions import Completions, Launched, Through
from stagemesh.shared.stage.device_frames import Frame, Frames
from stagemesh.shared.stage.executor import Onwards, StageExecutor
from stagemesh.shared.stage.forward import ForwardThread
from stagemesh.shared.stage.kv_sender import KvSender
from stagemesh.shared.stage.occupancy import Activity
from stagemesh.shared.stage.parts import StageParts

if TYPE_CHECKING:  # they need what is on a GPU host alone
    from stagemesh.shared.engine.cuda_runner import CudaStageRunner
    from stagemesh.shared.stage.cuda_parts import DeviceParts


class CudaStageExecutor(StageExecutor):
    """`inbox`: activations from the previous stage or, on the first decode stage, ids from the last one. `outbox`: the
    next stage's inbox; on the last decode stage the first one's; None on the last prefill stage. What a step leaves is
    handed on by the stream `beside` the computing one, if there is one: a short copy between two steps costs the device
    several times its own time."""

    def __init__(
        self,
        runner: CudaStageRunner,
        onwards: Onwards,
        *,
        stream: torch.cuda.Stream,
        beside: torch.cuda.Stream | None,
        inbox: DeviceInbox | None,
        outbox: DeviceOutbox | None,
        first: bool,
        last: bool,
        hidden_size: int,
        max_rows: int,
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
        self._cuda_runner, self._stream, self._beside = runner, stream, beside
        self._inbox, self._outbox = inbox, outbox
        self._first, self._last, self._hidden_size = first, last, hidden_size
        self._in_flight = 0
        self._submitted_ns: dict[int, int] = {}  # when the step's command came; of steps that are not through
        self._frames = Frames(max_rows)
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

    def submit(self, command: Command) -> None:
        super().submit(command)
        if command.step is not None:
            self._submitted_ns[command.step.number] = time.monotonic_ns()

    async def run(self) -> None:
        completions = self._completions = Completions(asyncio.get_running_loop(), self._frames, self._fail)
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
        pages = self._pages_of(step)  # a row may be dropped before this stage hears that the step is over
        self._completions.expect(launched, lambda through: self._completed(step, pages, launched, through))

    def _rest(self) -> None:
        if not self._in_flight:
            super()._rest()

    def _launch(self, command: Command, step: Step) -> Launched:
        """On the forward thread."""
        start_ns = time.monotonic_ns()
        self._runner.apply(command)
        frames, frame = self._frames, self._frames.take()
        forward = self._cuda_runner.prepare(step)
        hidden = self._await_inputs(step)
        frames.record(frame.begun, self._stream)
        output = forward(hidden)
        frames.record(frame.computed, self._stream)
        self._hand_on(step, frame, output.tensor)
        num_ids = len(step.rows) if self._last else 0
        handed_on = None if self._beside is None else output.tensor
        end_ns = time.monotonic_ns()
        return Launched(frame, num_ids, handed_on, output.logprobs, end_ns - start_ns, end_ns)

    def _hand_on(self, step: Step, frame: Frame, output: Tensor) -> None:
        frames, stream = self._frames, self._stream
        if self._beside is not None:
            stream = self._beside
            frames.follow(stream, frame.computed)
        if self._outbox is not None:
            self._outbox.send(stream, step.number, output)
        if self._last:
            frames.copy_ids(frame, output, stream)
        frames.record(frame.done, stream)

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

    def _completed(self, step: Step, pages: list[list[int]], launched: Launched, through: Through) -> None:
        """On the loop, which makes no call to the device."""
        self._in_flight -= 1
        self.clock.end(time.monotonic())
        self.steps_done += 1
        self.busy_ms += through.busy_ms
        self.idle_ms += through.idle_ms
        self.launch_ns += launched.launch_ns
        self.launch_s = (launched.end_ns - self._submitted_ns.pop(step.number)) / 1e9
        self._rest()
        start_ns = through.end_ns - round(through.busy_ms * 1e6)
        self._tracer.span(
            "forward",
            start_ns,
            through.end_ns,
            step=step.number,
            microbatch=step.microbatch,
            rows=len(step.rows),
            tokens=step.num_tokens,
            launch_ns=launched.launch_ns,
        )
        self._tracer.requests.ran(step, start_ns)
        self._progressed(step, pages)
        if self._last:
            self._onwards.result(step.number, through.ids, launched.logprobs)


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
    outbox = None
    if spec is not None:
        outbox = DeviceOutbox(spec)
    elif parts.first and parts.last and device.inbox is not None:
        outbox = DeviceOutbox(device.inbox.spec, local=device.inbox)
    return CudaStageExecutor(
        cast("CudaStageRunner", parts.runner),
        onwards,
        stream=device.stream,
        beside=device.beside,
        inbox=device.inbox,
        outbox=outbox,
        first=parts.first,
        last=parts.last,
        hidden_size=parts.config.hidden_size,
        max_rows=device.max_rows,
        kv=kv,
        spawn=spawn,
        tracer=tracer,
    )


async def _raise(error: Exception) -> None:
    raise error
