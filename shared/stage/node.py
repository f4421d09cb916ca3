"""A stage that is up: what comes round the ring goes to its executor, its KV sender and its head, and on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from stagemesh.shared.core.commands import Command, Ints, RowLogprobs
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.metrics import Sample
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.describe import StageNames, describe_executor, describe_outgoing
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.head import Head
from stagemesh.shared.stage.kv_sender import KvSender
from stagemesh.shared.stage.measure import measure_kv, measure_stage
from stagemesh.shared.stage.ring import RingOut


class StageNode:
    """Listens to the ring. `head` is there on rank 0 only, `kv` on prefill stages only."""

    def __init__(
        self,
        *,
        runner: StageRunner,
        executor: StageExecutor,
        ring: RingOut,
        tasks: Tasks,
        kv: KvSender | None,
        last: bool,
    ) -> None:
        self.executor, self._runner, self._ring, self._tasks = executor, runner, ring, tasks
        self._kv, self._last = kv, last
        self.head: Head | None = None

    def issue(self, command: Command) -> None:
        """The head's commands enter the ring here."""
        if not self._last:
            self._ring.command(command)
        self.executor.submit(command)

    def settled(self, ticket_id: str, pp_rank: int) -> None:
        """This stage has nothing of the ticket in flight any more."""
        if self.head is None:
            self._ring.settled(ticket_id, pp_rank)
        else:
            self.head.on_settled(ticket_id, pp_rank)

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

    def on_settled(self, ticket_id: str, pp_rank: int) -> None:
        self.settled(ticket_id, pp_rank)

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
        if self.head is not None:
            yield from self.head.describe(now_ns / 1e9)

    def check_integrity(self) -> None:
        if self.head is not None:
            self.head.check_integrity()

    @property
    def held(self) -> Mapping[str, int]:
        """What is in flight; all zero when nothing is."""
        own = {
            "residents": self._runner.num_residents,
            "queued_commands": self.executor.num_queued,
            "outgoing_tickets": 0 if self._kv is None else self._kv.num_tickets,
            "tasks": len(self._tasks),
        }
        return own if self.head is None else {**own, **self.head.held}
