"""What a stage waits for, in words: for an operator before a mesh that stands still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from stagemesh.shared.engine.host_copies import Direction, HostCopies
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.obs.entry import Detail, Entry
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.kv_sender import Outgoing
from stagemesh.shared.stage.occupancy import Activity
from stagemesh.shared.transfer.base import FINAL_STATES


@dataclass(frozen=True, slots=True)
class StageNames:
    """How this stage and its neighbours in the ring are called."""

    instance: str
    pp_rank: int
    pp_size: int

    @property
    def own(self) -> str:
        return f"{self.instance}/{self.pp_rank}"

    @property
    def previous(self) -> str:
        return f"{self.instance}/{(self.pp_rank - 1) % self.pp_size}"

    @property
    def following(self) -> str:
        return f"{self.instance}/{(self.pp_rank + 1) % self.pp_size}"


def describe_executor(
    executor: StageExecutor, names: StageNames, *, residents: int, ring_queue: int, now_ns: int
) -> Iterator[Entry]:
    """The executor itself, then activations on their way to the next stage. `now_ns` is CLOCK_MONOTONIC."""
    occupancy = executor.occupancy
    waits_for, on = _executor_wait(executor, names)
    details = {
        "commands_queued": executor.num_queued,
        "ring_queue": ring_queue,
        "residents": residents,
        "steps_done": executor.steps_done,
    }
    age_s = (now_ns - occupancy.since_ns) / 1e9
    yield Entry("executor", names.own, age_s, occupancy.activity.value, waits_for, on, details)
    for step, since_ns in executor.hops.items():
        waits_for = "its activations to be written to the next stage"
        yield Entry("hop", f"of step {step}", (now_ns - since_ns) / 1e9, "", waits_for, (names.following,))


def _executor_wait(executor: StageExecutor, names: StageNames) -> tuple[str, tuple[str, ...]]:
    step, head = executor.step, f"{names.instance}/0"
    if step is None:
        return "the next command", () if names.own == head else (names.previous,)
    if executor.occupancy.activity is Activity.FORWARD:
        return f"the forward pass of step {step.number}", ()
    if names.pp_rank:
        return f"the activations of step {step.number}", (names.previous,)
    missing = ", ".join(map(str, sorted(executor.missing_ids)))
    return f"the ids of step {missing}, for step {step.number}", (names.previous,)


def describe_copies(copies: HostCopies, names: StageNames, now_s: float) -> Iterator[Entry]:
    """KV on its way to host memory or back; what lies there waits for its head. `now_s` is CLOCK_MONOTONIC."""
    for handle, copy in copies.copies.items():
        if copy.way is not None:
            state = "saving" if copy.way is Direction.TO_HOST else "loading"
            details: dict[str, Detail] = {"pages": copy.num_pages}
            waits_for = "the copier's thread"
            yield Entry("copy", f"of sequence {handle}", now_s - copy.since_s, state, waits_for, (names.own,), details)


def describe_outgoing(outgoing: Outgoing, page_size: int, now_s: float) -> Entry:
    """A prompt whose KV is on its way. `now_s` is CLOCK_MONOTONIC."""
    plan = outgoing.plan
    states = Counter(transfer.state for _, transfer in outgoing.handles)
    writing = {span.target_rank for span, transfer in outgoing.handles if transfer.state not in FINAL_STATES}
    details: dict[str, Detail] = {
        "pages_written": f"{outgoing.next_page}/{pages_for(plan.prompt_tokens, page_size)}",
        **{f"writes_{state.value}": count for state, count in states.items()},
    }
    on = tuple(target.address for target in plan.targets if target.pp_rank in writing)
    state = "cancelled" if outgoing.cancelled else "sending"
    if outgoing.reporting_s is not None:
        details["reporting_s"] = round(now_s - outgoing.reporting_s, 3)
        waits_for, on = "the broker to take its report", ("broker",)
    elif writing:
        waits_for = "its writes to settle"
    else:
        waits_for = "the next chunk"
    return Entry("outgoing", plan.ticket_id, now_s - outgoing.joined_s, state, waits_for, on, details)
