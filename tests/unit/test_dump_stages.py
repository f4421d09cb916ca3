"""What a stage waits for, in words, and the bubble that it counts meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.shared.core.commands import EMPTY, FROM_STEP, SAMPLE, Command, Ints, Join, RowLogprobs, SendPlan, Step
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.runner import StepOutput
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.describe import StageNames, describe_executor, describe_outgoing
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.kv_sender import Outgoing, PieceSpan
from stagemesh.shared.stage.occupancy import Activity
from stagemesh.shared.transfer.base import TransferState
from stagemesh.shared.transfer.handle import Transfer
from tests.support.instances import DECODE, instance_of

FAR_S = 1e12  # later than any clock of this machine
REQUEST = RequestRef("r", 1)
TARGETS = instance_of("decode-0", DECODE).stages


class Runner:
    """Has one sequence once it was told to, and samples the step's number."""

    def __init__(self) -> None:
        self.num_residents = 0

    def apply(self, command: Command) -> None:
        self.num_residents += len(command.joins) - len(command.drops)

    def run(self, step: Step, **_: object) -> StepOutput:
        return StepOutput(torch.full((len(step.rows),), step.number))


class Heard:
    """What the executor says, as events."""

    def __init__(self) -> None:
        self.applied_first, self.first_result = asyncio.Event(), asyncio.Event()

    def data_ready(self, step: int, num_tokens: int) -> None:
        raise AssertionError("a stage alone sends nothing on")

    def result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None:
        self.first_result.set()

    def applied(self, number: int) -> None:
        self.applied_first.set()


NAMES = StageNames("decode-0", 0, 2)


def spawn_nothing(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("nothing is to be spawned")


def told(executor: StageExecutor, names: StageNames = NAMES) -> tuple[str, str, tuple[str, ...]]:
    (entry,) = describe_executor(executor, names, residents=1, ring_queue=0, now_ns=int(FAR_S * 1e9))
    return entry.state, entry.waits_for, entry.on


def with_executor(follow: Callable[[StageExecutor, Heard], Coroutine[Any, Any, None]]) -> None:
    """Runs `follow` beside an executor that is its instance's only stage."""

    async def run() -> None:
        heard, runner = Heard(), Runner()
        executor = StageExecutor(
            runner,  # type: ignore[arg-type]
            heard,
            receiver=None,
            sender=None,
            kv=None,
            spawn=spawn_nothing,
            tracer=Tracer("decode-0/0"),
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(executor.run())
            await follow(executor, heard)
            running.cancel()

    asyncio.run(run())


def step_of(number: int, source_step: int) -> Step:
    return Step(number, 0, np.array([[1, 4, 1, source_step, 0, SAMPLE | FROM_STEP]]), EMPTY)


def test_a_stage_says_what_it_waits_for_and_counts_the_bubble() -> None:
    join = Join(1, REQUEST, SamplingParams(max_tokens=5))

    async def follow(executor: StageExecutor, heard: Heard) -> None:
        assert told(executor) == ("idle", "the next command", ())
        executor.submit(Command(1, joins=(join,)))
        assert executor.occupancy.activity is Activity.STARVED  # it has work from now on
        executor.submit(Command(2, step=step_of(8, source_step=7)))
        await heard.applied_first.wait()
        assert told(executor) == ("starved", "the ids of step 7, for step 8", ("decode-0/1",))
        executor.sampled(7, np.array([3]))
        await heard.first_result.wait()
        assert told(executor) == ("starved", "the next command", ())
        assert executor.steps_done == 1
        heard.applied_first.clear()
        executor.submit(Command(3, drops=(1,)))
        await heard.applied_first.wait()
        assert told(executor) == ("idle", "the next command", ())
        for activity in (Activity.STARVED, Activity.FORWARD):
            assert executor.occupancy.seconds(activity, executor.occupancy.since_ns) > 0

    with_executor(follow)


def test_a_later_stage_waits_for_the_one_before() -> None:
    async def follow(executor: StageExecutor, heard: Heard) -> None:
        later = StageNames("decode-0", 2, 3)
        assert told(executor, later) == ("idle", "the next command", ("decode-0/1",))
        executor.submit(Command(1))
        executor.submit(Command(2, step=step_of(8, source_step=7)))
        await heard.applied_first.wait()
        assert told(executor, later) == ("starved", "the activations of step 8", ("decode-0/1",))
        executor.hops[5] = 0
        hop = list(describe_executor(executor, later, residents=0, ring_queue=0, now_ns=2_000_000_000))[1]
        assert (hop.name, hop.age_s, hop.on) == ("of step 5", 2.0, ("decode-0/0",))

    with_executor(follow)


def transfer_of(num_batches: int) -> Transfer:
    return Transfer(num_pieces=2, num_bytes=8, num_batches=num_batches, on_settled=lambda _: None)


def test_an_outgoing_prompt_names_the_stages_that_it_still_writes_to() -> None:
    outgoing = Outgoing(SendPlan("t", 12, (0, 1, 2), TARGETS))
    done, open_write = transfer_of(0), transfer_of(1)
    outgoing.handles += [(PieceSpan(0, 0, 2), done), (PieceSpan(1, 0, 2), open_write)]
    outgoing.next_page = 2
    entry = describe_outgoing(outgoing, 4, FAR_S)
    assert (entry.waits_for, entry.on) == ("its writes to settle", (TARGETS[1].address,))
    assert entry.details == {"pages_written": "2/3", "writes_done": 1, "writes_queued": 1}
    open_write.batch_done(8)
    assert open_write.state is TransferState.DONE
    assert describe_outgoing(outgoing, 4, FAR_S).waits_for == "the next chunk"
    outgoing.reporting_s = FAR_S - 2
    entry = describe_outgoing(outgoing, 4, FAR_S)
    assert (entry.waits_for, entry.on, entry.details["reporting_s"]) == (
        "the broker to take its report",
        ("broker",),
        2,
    )


@pytest.mark.parametrize(("rank", "previous", "following"), [(0, "d/2", "d/1"), (2, "d/1", "d/0")])
def test_the_ring_has_no_end(rank: int, previous: str, following: str) -> None:
    names = StageNames("d", rank, 3)
    assert (names.previous, names.following) == (previous, following)
