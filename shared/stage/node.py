"""A stage that is up: what comes round the ring goes to its executor, its KV sender and its head, and on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping

from stagemesh.shared.core.commands import Command, Ints, RowLogprobs
from stagemesh.shared.core.progress import StageProgress
from stagemesh.shared.engine.host_copies import CopyDone, Direction
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.metrics import Sample
from stagemesh.shared.pb import stage_pb2
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.stage.describe import StageNames, describe_copies, describe_executor, describe_outgoing
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.head import Head
from stagemesh.shared.stage.kv_sender import KvSender
from stagemesh.shared.stage.measure import measure_copies, measure_kv, measure_stage
from stagemesh.shared.stage.read_outs import ReadOuts
from stagemesh.shared.stage.ring import RingOut
from stagemesh.shared.transfer.base import Endpoint


class StageNode:
    """Listens to the ring. `head` is there on rank 0 only, `kv` on prefill stages only."""

    def __init__(
        self,
        pp_rank: int,
        *,
        runner: StageRunner,
        executor: StageExecutor,
        ring: RingOut,
        tasks: Tasks,
        kv: KvSender | None,
        last: bool,
        endpoint: Endpoint,
        checksums: Checksums,
    ) -> None:
        self.executor, self._runner, self._ring, self._tasks = executor, runner, ring, tasks
        self._pp_rank, self._kv, self._last = pp_rank, kv, last
        self.checksums = checksums
        self._read_outs = ReadOuts(endpoint.read_out, spawn=tasks.spawn, answer=self._have_read_out)
        loop = asyncio.get_running_loop()
        runner.copies.listen(lambda done: loop.call_soon_threadsafe(self._on_copy_done, done))
        self.head: Head | None = None

    def issue(self, command: Command) -> None:
        """The head's commands enter the ring here."""
        if not self._last:
            self._ring.command(command)
        self.executor.submit(command)

    def settled(self, settled: stage_pb2.Settled) -> None:
        """A stage has nothing of a ticket in flight any more."""
        if self.head is None:
            self._ring.settled(settled)
        else:
            self.head.on_settled(settled)

    def copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        """That stage has the KV of the sequence in host memory, or back in its pages."""
        if self.head is None:
            self._ring.copied(handle, pp_rank, restored=restored)
        else:
            self.head.on_copied(handle, pp_rank, restored=restored)

    def pulse(self) -> None:
        """Says round the ring how far this stage is."""
        executor = self.executor
        step_s = executor.clock.expected_s
        self._ring.pulse(StageProgress(self._pp_rank, executor.steps_done, executor.has_work, step_s))

    def ask_read_out(self, number: int) -> None:
        """Every stage is to read what processes have sent that have ended, and to say so."""
        if not self._last:
            self._ring.read_out(number)
        self._read_outs.ask(number)

    def _have_read_out(self, number: int, error: str) -> None:
        self.on_answer(stage_pb2.Answer(number=number, pp_rank=self._pp_rank, error=error))

    def ask_verify(self, verify: stage_pb2.Verify) -> None:
        """Every stage is to verify its own of these checks, and to say so."""
        if not self._last:
            self._ring.verify(verify)
        self._tasks.spawn(self._verify(verify))

    async def _verify(self, verify: stage_pb2.Verify) -> None:
        answer = stage_pb2.Answer(number=verify.number, pp_rank=self._pp_rank)
        for check in verify.checks:
            if check.target_rank == self._pp_rank and not answer.error:
                verdict = await self.checksums.verify(check)
                answer.num_wrong = verdict.num_wrong
                answer.error = f"decode stage {self._pp_rank}: {verdict.error}" if verdict.num_wrong else ""
        self.on_answer(answer)

    def _on_copy_done(self, done: CopyDone) -> None:
        if done.error is not None:  # a callback's exception would only be logged: it must end the stage
            self._tasks.spawn(_fail(done.error))
        else:
            self.copied(done.handle, self._pp_rank, restored=done.direction is Direction.TO_POOL)

    # -- what comes round the ring --

    def on_command(self, command: Command) -> None:
        self._only(self.head is None, "command")
        self.issue(command)

    def on_data_ready(self, step: int, num_tokens: int) -> None:
        self._only(self.head is None, "data_ready")
        self.executor.data_ready(step, num_tokens)

    def on_applied(self, number: int) -> None:
        if self.head is None:
            self.executor.upstream_applied(number)
        else:
            self.head.on_applied(number)

    def on_result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None:
        self._require_head("result").on_result(step, token_ids, logprobs)

    def on_settled(self, settled: stage_pb2.Settled) -> None:
        self.settled(settled)

    def on_copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        self.copied(handle, pp_rank, restored=restored)

    def on_pulse(self, progress: StageProgress) -> None:
        if self.head is not None:
            self.head.on_pulse(progress)
        elif progress.pp_rank != self._pp_rank:
            self._ring.pulse(progress)

    def on_read_out(self, number: int) -> None:
        self._only(self.head is None, "read_out")
        self.ask_read_out(number)

    def on_verify(self, verify: stage_pb2.Verify) -> None:
        self._only(self.head is None, "verify")
        self.ask_verify(verify)

    def on_answer(self, answer: stage_pb2.Answer) -> None:
        if self.head is None:
            self._ring.answer(answer)
        else:
            self.head.on_answer(answer)

    def _only(self, allowed: bool, kind: str) -> None:
        if not allowed:
            raise ProtocolViolation(f"the ring brings {kind} to a stage that takes none")

    def _require_head(self, kind: str) -> Head:
        if self.head is None:
            raise ProtocolViolation(f"the ring brings {kind} to a stage without a head")
        return self.head

    # -- views --

    def measure(self) -> Iterator[Sample]:
        yield from measure_stage(self._runner, self.executor, time.monotonic_ns())
        yield from measure_copies(self._runner.copies)
        yield Sample(metrics.KV_CHECKED, self.checksums.num_checked)
        if self._kv is not None:
            yield from measure_kv(self._kv.counts)
        if self.head is not None:
            yield from self.head.measure()

    def describe(self, names: StageNames, page_size: int) -> Iterator[Entry]:
        now_ns = time.monotonic_ns()
        yield from describe_executor(
            self.executor,
            names,
            residents=self._runner.num_residents,
            ring_queue=self._ring.num_queued,
            now_ns=now_ns,
        )
        for outgoing in [] if self._kv is None else self._kv.unfinished:
            yield describe_outgoing(outgoing, page_size, now_ns / 1e9)
        yield from describe_copies(self._runner.copies, names, now_ns / 1e9)
        if self.head is not None:
            yield from self.head.describe(now_ns / 1e9)

    def check_integrity(self) -> None:
        self._runner.copies.check_integrity()
        if self.head is not None:
            self.head.check_integrity()

    @property
    def held(self) -> Mapping[str, int]:
        """What is in flight; all zero when nothing is."""
        own = {
            "residents": self._runner.num_residents,
            "queued_commands": self.executor.num_queued,
            "host_copies": len(self._runner.copies.copies),
            "outgoing_tickets": 0 if self._kv is None else self._kv.num_tickets,
            "tasks": len(self._tasks),
        }
        return own if self.head is None else {**own, **self.head.held}


async def _fail(error: BaseException) -> None:
    raise error
