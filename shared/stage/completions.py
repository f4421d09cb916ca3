"""Steps that are on a GPU, until it is through with them: a thread waits for the device, the loop never does.

expect --> [thread: until the step's `done` has come] --> what it was told to call, on the loop, in order
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from stagemesh.shared.core.commands import Ints, RowLogprobs
from stagemesh.shared.stage.device_frames import Frame, Frames


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device. `frame` is around what it computes; `num_ids` come into it, on the last stage. `handed_on`
    is kept until the device is through: its memory is the computing stream's, which waits for no copy of it."""

    frame: Frame
    num_ids: int
    handed_on: Tensor | None
    logprobs: RowLogprobs
    launch_ns: int
    end_ns: int  # of the launch, CLOCK_MONOTONIC


@dataclass(frozen=True, slots=True)
class Through:
    """The device was seen to be through with a step at `end_ns` (CLOCK_MONOTONIC). By its own clock it was busy with it
    for `busy_ms`, and idle since the step before it for `idle_ms`. `ids` int64 [num_ids]."""

    end_ns: int
    busy_ms: float
    idle_ms: float
    ids: Ints


class Completions:
    """A thread that waits for the device, event after event, and calls the loop back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frames: Frames, fail: Callable[[Exception], None]) -> None:
        self._loop, self._frames, self._fail = loop, frames, fail
        self._queue: queue.SimpleQueue[tuple[Launched, Callable[[Through], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="completions", daemon=True)
        self._thread.start()

    def expect(self, launched: Launched, then: Callable[[Through], None]) -> None:
        """`then` is called on the loop, in the order of calls of this. Bounded by the head's steps outstanding."""
        self._queue.put((launched, then))

    def close(self) -> None:
        """Does not wait: a stage whose peers are gone may have steps on the device that never end."""
        self._queue.put(None)

    def _wait(self) -> None:
        before: Frame | None = None  # its end is what the next step's idle time is counted from
        while (expected := self._queue.get()) is not None:
            launched, then = expected
            try:
                through = self._await(launched, before)
            except Exception as error:  # whatever the device has to say
                self._tell(partial(self._fail, error))
                return
            if before is not None:
                self._frames.give_back(before)
            before = launched.frame
            self._tell(partial(self._call, then, through))
        if before is not None:
            self._frames.give_back(before)
        self._frames.close()

    def _await(self, launched: Launched, before: Frame | None) -> Through:
        frames, frame = self._frames, launched.frame
        frames.wait(frame.done)
        end_ns = time.monotonic_ns()
        busy_ms = frames.between_ms(frame.begun, frame.computed)
        idle_ms = 0.0 if before is None else frames.between_ms(before.computed, frame.begun)
        return Through(end_ns, busy_ms, idle_ms, frames.ids(frame, launched.num_ids))

    def _call(self, then: Callable[[Through], None], through: Through) -> None:
        try:
            then(through)
        except Exception as error:
            self._fail(error)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what)
