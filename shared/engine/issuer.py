"""The numbers of commands and steps, and what comes back when every stage has acknowledged them.

What a scheduler decides between two steps (joins, drops, cancels, copies, new pages) is collected here and travels with
the next command. Pages of a dropped sequence are free once every stage has applied the command that drops it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from stagemesh.shared.core.commands import Command, Ints, Join, Step, pack_deltas
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.errors import Bug


class Issuer:
    """One for each instance. Handles are never reused within an epoch."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._last_command = self._last_step = self._last_handle = 0
        self._applied = 0
        self._joins: list[Join] = []
        self._drops: list[int] = []
        self._cancels: list[int] = []
        self._retracts: list[int] = []
        self._resumes: list[int] = []
        self._deltas: dict[int, list[int]] = {}
        self._dropped_pages: list[int] = []
        self._freeing: dict[int, list[int]] = {}  # command number -> pages that it frees
        self.outstanding: dict[int, Step] = {}  # step number -> step whose result is not back
        self._command_of: dict[int, int] = {}  # step number -> the command that carries it
        self._step_issued_s: dict[int, float] = {}  # step number -> when, until its result is back
        self._issued_s: dict[int, float] = {}  # command number -> when, until all stages have applied it

    @property
    def steps_issued(self) -> int:
        return self._last_step

    @property
    def unacknowledged(self) -> int:
        return self._last_command - self._applied

    @property
    def num_freeing(self) -> int:
        return sum(len(pages) for pages in self._freeing.values()) + len(self._dropped_pages)

    @property
    def commands_out(self) -> Mapping[int, float]:
        """Commands that not every stage has applied, but for those of outstanding steps; oldest first, and when they
        were issued."""
        with_step = set(self._command_of.values())
        return {number: issued_s for number, issued_s in self._issued_s.items() if number not in with_step}

    def issued_s(self, step_number: int) -> float:
        """When an outstanding step was issued."""
        return self._step_issued_s[step_number]

    def new_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    def join(self, join: Join) -> None:
        self._joins.append(join)

    def add_pages(self, handle: int, pages: list[int]) -> None:
        if pages:
            self._deltas.setdefault(handle, []).extend(pages)

    def cancel(self, handle: int) -> None:
        self._cancels.append(handle)

    def is_joining(self, handle: int) -> bool:
        """It joins with the next command."""
        return any(join.handle == handle for join in self._joins)

    def retract(self, handle: int) -> None:
        """Its KV is to be copied to host memory, from the pages that the stages know of. They are its own until every
        stage has said that it has. Raises Bug for one whose pages travel with the same command: a command's retracts
        come before its page deltas."""
        if handle in self._deltas:
            raise Bug(f"sequence {handle} is retracted, but its stages have not heard of all its pages")
        self._retracts.append(handle)

    def resume(self, handle: int, pages: list[int]) -> None:
        """Its KV is to be copied back into `pages`."""
        self.add_pages(handle, pages)
        self._resumes.append(handle)

    def drop(self, handle: int, pages: list[int]) -> None:
        """The sequence leaves every stage; its pages follow when all have acknowledged. No step of it may be out."""
        self._deltas.pop(handle, None)  # no step will need them: a command's drops come before its page deltas
        if self.is_joining(handle):  # no stage has heard of it
            self._joins = [join for join in self._joins if join.handle != handle]
            self._pages.release(pages)
            return
        self._drops.append(handle)
        self._dropped_pages += pages

    def issue_step(self, microbatch: int, rows: Ints, tokens: Ints) -> Command:
        self._last_step += 1
        step = Step(self._last_step, microbatch, rows, tokens)
        self.outstanding[step.number] = step
        return self._issue(step)

    def flush(self) -> Command | None:
        """What is collected, as a command without a step, or None if there is nothing."""
        collected = self._drops or self._cancels or self._joins or self._retracts or self._resumes
        return self._issue(None) if collected else None

    def take_result(self, step_number: int) -> Step:
        """The step whose result has come back: every stage has applied its command. Raises Bug if it was not out."""
        step = self.outstanding.pop(step_number, None)
        if step is None:
            raise Bug(f"a result of step {step_number}, which is not outstanding")
        del self._step_issued_s[step_number]
        self.applied(self._command_of.pop(step_number))
        return step

    def applied(self, number: int) -> None:
        """Every stage has applied all commands up to `number`."""
        if not 0 <= number <= self._last_command:
            raise Bug(f"acknowledged {number}, but {self._last_command} is the last issued")
        self._applied = max(self._applied, number)
        for known in [command for command in self._issued_s if command <= number]:
            del self._issued_s[known]
        for freed in [command for command in self._freeing if command <= number]:
            self._pages.release(self._freeing.pop(freed))

    def _issue(self, step: Step | None) -> Command:
        self._last_command += 1
        now_s = self._issued_s[self._last_command] = time.monotonic()
        command = Command(
            self._last_command,
            drops=tuple(self._drops),
            cancels=tuple(self._cancels),
            joins=tuple(self._joins),
            retracts=tuple(self._retracts),
            resumes=tuple(self._resumes),
            page_deltas=pack_deltas(self._deltas),
            step=step,
        )
        if step is not None:
            self._command_of[step.number], self._step_issued_s[step.number] = command.number, now_s
        if self._dropped_pages:
            self._freeing[command.number] = self._dropped_pages
        self._joins, self._drops, self._cancels, self._deltas, self._dropped_pages = [], [], [], {}, []
        self._retracts, self._resumes = [], []
        return command
