"""Decode stages that take time: one unit a step and stage, on a clock of their own; results come back at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from stagemesh.shared.core.commands import HANDLE, Command, Step
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.decode import DecodeScheduler

PROMPT_TOKENS = 4
MAX_TOKENS = 800
STEP_S = 0.01


class TimedDecode:
    """A step begins on a stage when that is free, the stage before is through with it and, on the first, the ids that
    it takes are sampled. Times are in steps of one stage: a cycle of the pipeline is as many as there are stages."""

    def __init__(
        self, num_stages: int, *, running: int, late_issue: bool = False, launch: float = 0.0, is_told: bool = True
    ) -> None:
        """`late_issue` wants `monotonic` to be the clock that the scheduler reads. A step is on the first stage
        `launch` after it is issued, which the scheduler `is_told`."""
        self.scheduler = DecodeScheduler(
            num_pages=1 << 11,
            page_size=16,
            num_microbatches=num_stages,
            max_running=128,
            pp_size=num_stages,
            late_issue=late_issue,
        )
        self.now, self.step_time = 0.0, 1.0
        self._launch, self._is_told = launch, is_told
        self._num_stages = num_stages
        self._free_at = [0.0] * num_stages
        self._sampled_at: dict[int, float] = {}
        self._results: list[tuple[float, Step]] = []  # in order of time, which is that of the steps
        self.begun: list[tuple[float, Step]] = []  # on the first stage
        self._again: float | None = None  # when the scheduler wants to be polled
        self._count = 0
        for _ in range(running):
            self.add()

    def add(self) -> int:
        """A sequence whose KV and first token come now. Its handle."""
        self._count += 1
        request, ticket = RequestRef(f"r{self._count}", 1), f"t{self._count}"
        self.announce(request, ticket)
        self.scheduler.commit(ticket)
        self.scheduler.first_token(request, 7)
        handle = next(s.handle for s in self.scheduler.sequences if s.ticket_id == ticket)
        self._poll()
        return handle

    def announce(self, request: RequestRef, ticket: str) -> None:
        """Its prompt is being computed from now on."""
        self.scheduler.submit(request, SamplingParams(max_tokens=MAX_TOKENS), PROMPT_TOKENS, ticket)
        self.scheduler.reserve(ticket, request)
        self._poll()

    def monotonic(self) -> float:
        return self.now * STEP_S

    def run_until(self, time: float) -> None:
        while (event := self._next_event()) <= time:
            self.now = event
            if self._results and self._results[0][0] <= event:
                _, step = self._results.pop(0)
                if self._is_told:
                    self.scheduler.launched(self._launch * STEP_S)
                self.scheduler.result(step.number, np.full(len(step.rows), 7))
            self._poll()
        self.now = time

    def _next_event(self) -> float:
        times = [self._results[0][0]] if self._results else []
        return min(times + ([] if self._again is None else [self._again]), default=float("inf"))

    def first_step_wait(self) -> float:
        """From now, when a sequence comes, until its first step begins."""
        came, handle = self.now, self.add()
        while not (begun := [at for at, step in self.begun if handle in step.rows[:, HANDLE].tolist()]):
            self.run_until(self._next_event())
        return begun[0] - came

    def gaps(self, since: float) -> list[float]:
        """Between the beginnings of two steps of a sequence that follow each other, of all sequences, from then on."""
        begun: dict[int, list[float]] = {}
        for at, step in (begun for begun in self.begun if begun[0] >= since):
            for handle in step.rows[:, HANDLE].tolist():
                begun.setdefault(handle, []).append(at)
        return [later - before for times in begun.values() for before, later in pairwise(times)]

    def _poll(self) -> None:
        actions = self.scheduler.poll()
        self._again = None if actions.again_s is None else actions.again_s / STEP_S
        for command in actions.commands:
            self._run(command)

    def _run(self, command: Command) -> None:
        if (step := command.step) is None:
            return
        at = max([self.now + self._launch, *(self._sampled_at[number] for number in step.source_steps)])
        for stage in range(self._num_stages):
            begins = max(at, self._free_at[stage])
            if stage == 0:
                self.begun.append((begins, step))
            at = self._free_at[stage] = begins + self.step_time
        self._sampled_at[step.number] = at
        self._results.append((at, step))
