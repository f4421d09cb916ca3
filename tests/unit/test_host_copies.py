"""KV of retracted sequences: out of the pool and back, byte for byte, while the stage goes on."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from stagemesh.shared.core.commands import SAMPLE, Command, Join, Step, pack_deltas
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.host_copies import CopyDone, CpuPageCopier, Direction, HostCopies
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.errors import Bug, ProtocolViolation
from stagemesh.shared.obs import metrics
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.describe import StageNames, describe_copies
from stagemesh.shared.stage.measure import measure_copies
from stagemesh.shared.stage.node import StageNode
from stagemesh.shared.stage.ring import RingOut

LIMIT_S = 30.0
PAGE, NUM_PAGES, LAYERS = 4, 12, 3
SAMPLING = SamplingParams(max_tokens=8)
TO_HOST, TO_POOL = Direction.TO_HOST, Direction.TO_POOL
Made = TypeVar("Made")


class GatedCopier:
    """Copies as the CPU's does, once its gate is open; fails if it is told to."""

    def __init__(self, pool: Tensor) -> None:
        self._inner = CpuPageCopier(pool)
        self.page_bytes = self._inner.page_bytes
        self.gate = threading.Event()
        self.failure: Exception | None = None

    def save(self, pages: Sequence[int]) -> Callable[[], Tensor]:
        return self._gated(self._inner.save(pages))

    def load(self, saved: Tensor, pages: Sequence[int]) -> Callable[[], None]:
        return self._gated(self._inner.load(saved, pages))

    def _gated(self, work: Callable[[], Made]) -> Callable[[], Made]:
        def wait() -> Made:
            assert self.gate.wait(LIMIT_S)
            if self.failure is not None:
                raise self.failure
            return work()

        return wait


class Stage:
    """A runner without layers, whose pool is full of noise. `done` brings what the copies say."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        noise = torch.randint(0, 256, (NUM_PAGES, LAYERS, 2, PAGE, 2, 8 * dtype.itemsize), dtype=torch.uint8)
        self.pool = noise.view(dtype)
        self.copier = GatedCopier(self.pool)
        self.copies = HostCopies(self.copier, NUM_PAGES * self.copier.page_bytes)
        self.runner = StageRunner(cast("Any", None), self.pool, first=True, last=True, copies=self.copies)
        self.done: SimpleQueue[CopyDone] = SimpleQueue()
        self.copies.listen(self.done.put)
        self._number = 0

    def apply(self, *, joins: Sequence[int] = (), pages: dict[int, list[int]] | None = None, **lists: Any) -> None:
        self._number += 1
        joining = tuple(Join(handle, RequestRef(str(handle), 1), SAMPLING) for handle in joins)
        self.runner.apply(Command(self._number, joins=joining, page_deltas=pack_deltas(pages or {}), **lists))

    def bytes_of(self, pages: Sequence[int]) -> Tensor:
        return self.pool[list(pages)].view(torch.uint8).clone()

    def heard(self) -> tuple[int, Direction]:
        done = self.done.get(timeout=LIMIT_S)
        assert done.error is None
        return done.handle, done.direction


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.copier.gate.set()
    stage.copies.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_byte_comes_back_into_other_pages(dtype: torch.dtype) -> None:
    stage = Stage(dtype)
    stage.copier.gate.set()
    stage.apply(joins=[1, 2], pages={1: [7, 0, 3], 2: [5]})
    wanted = stage.bytes_of([7, 0, 3])
    stage.apply(retracts=(1,))
    assert stage.heard() == (1, TO_HOST)
    assert stage.runner.pages_of(1) == []
    assert stage.copies.num_bytes == wanted.numel()
    stage.pool[[7, 0, 3]] = 0  # given to others meanwhile
    before = stage.bytes_of(range(NUM_PAGES))
    stage.apply(pages={1: [11, 3, 8, 9]}, resumes=(1,))
    assert stage.heard() == (1, TO_POOL)
    assert stage.runner.pages_of(1) == [11, 3, 8, 9]
    assert torch.equal(stage.bytes_of([11, 3, 8]), wanted)
    others = [page for page in range(NUM_PAGES) if page not in (11, 3, 8)]
    assert torch.equal(stage.bytes_of(others), before[others])
    assert (stage.copies.num_bytes, stage.copies.copies) == (0, {})
    stage.copies.close()


def test_the_stage_goes_on_while_a_copy_is_under_way(stage: Stage) -> None:
    stage.apply(joins=[1, 2], pages={1: [0, 1], 2: [2]})
    stage.apply(retracts=(1, 2))
    stage.apply(joins=[3], pages={3: [3]})
    stage.apply(drops=(3,))
    assert stage.done.empty()
    assert [(handle, copy.way, copy.num_pages) for handle, copy in stage.copies.copies.items()] == [
        (1, TO_HOST, 2),
        (2, TO_HOST, 1),
    ]
    assert stage.copies.num_bytes == 3 * stage.copier.page_bytes  # taken, or about to be
    stage.copier.gate.set()
    assert [stage.heard(), stage.heard()] == [(1, TO_HOST), (2, TO_HOST)]
    assert [copy.way for copy in stage.copies.copies.values()] == [None, None]


def test_a_drop_frees_the_host_memory(stage: Stage) -> None:
    stage.copier.gate.set()
    stage.apply(joins=[1], pages={1: [0, 1]})
    stage.apply(retracts=(1,))
    stage.heard()
    data = weakref.ref(stage.copies._copies[1].data)
    stage.apply(drops=(1,))
    assert data() is None
    assert (stage.copies.num_bytes, stage.runner.num_residents) == (0, 0)


def test_orders_that_do_not_fit_are_violations(stage: Stage) -> None:
    stage.apply(joins=[1, 2], pages={1: [0, 1], 2: [2]})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"retracts": (9,)}, "names sequence 9, which is not on this stage"),
        ({"resumes": (9,)}, "names sequence 9, which is not on this stage"),
        ({"resumes": (1,)}, "1 is resumed, but it has no host copy"),
    ]
    for lists, message in cases:
        with pytest.raises(ProtocolViolation, match=message):
            stage.apply(**lists)
    stage.apply(retracts=(1,))
    cases = [
        ({"retracts": (1,)}, "1 is retracted, but its KV is not all here"),
        ({"resumes": (1,)}, "1 is resumed, but a copy of it is under way"),
        ({"drops": (1,)}, "1 is dropped, but a copy of it is under way"),
    ]
    for lists, message in cases:
        with pytest.raises(ProtocolViolation, match=message):
            stage.apply(**lists)
    stage.copier.gate.set()
    stage.heard()
    with pytest.raises(ProtocolViolation, match="1 is resumed into 1 pages of 2"):
        stage.apply(pages={1: [5]}, resumes=(1,))
    stage.copier.gate.clear()
    stage.apply(pages={1: [6]}, resumes=(1,))
    with pytest.raises(ProtocolViolation, match="1 is dropped, but a copy of it is under way"):
        stage.apply(drops=(1,))


def step_of(handle: int, start: int) -> Step:
    return Step(1, 0, np.array([[handle, start, 1, 0, 0, SAMPLE]]), np.array([5]))


def test_no_step_runs_without_its_kv(stage: Stage) -> None:
    stage.apply(joins=[1], pages={1: [0]})
    with pytest.raises(ProtocolViolation, match="1 to 5 tokens, its pages hold 4"):
        stage.runner.run(step_of(1, PAGE), hidden=None, sampled={})
    stage.apply(retracts=(1,))
    stage.apply(pages={1: [3]})
    with pytest.raises(ProtocolViolation, match="1, whose KV is not all here"):
        stage.runner.run(step_of(1, 2), hidden=None, sampled={})


def test_more_than_the_budget_is_a_bug() -> None:
    stage = Stage()
    copies = HostCopies(stage.copier, 2 * stage.copier.page_bytes)
    copies.save(1, [0, 1])
    copies.check_integrity()
    copies.save(2, [2])
    with pytest.raises(Bug, match="host copies take"):
        copies.check_integrity()
    stage.copier.gate.set()
    copies.close()


def test_closing_ends_the_thread_and_what_has_not_begun(stage: Stage) -> None:
    threads = threading.active_count()
    stage.apply(joins=[1, 2, 3], pages={1: [0], 2: [1], 3: [2]})
    stage.apply(retracts=(1, 2, 3))
    assert threading.active_count() == threads + 1
    stage.copier.gate.set()
    stage.copies.close()
    assert threading.active_count() == threads


def test_copies_are_counted_and_described(stage: Stage) -> None:
    stage.apply(joins=[1], pages={1: [0, 1]})
    stage.apply(retracts=(1,))
    (entry,) = describe_copies(stage.copies, StageNames("decode-0", 1, 2), 1e12)
    assert (entry.name, entry.state, entry.details) == ("of sequence 1", "saving", {"pages": 2})
    stage.copier.gate.set()
    stage.heard()
    assert list(describe_copies(stage.copies, StageNames("decode-0", 1, 2), 1e12)) == []
    stage.apply(pages={1: [4, 5]}, resumes=(1,))
    stage.heard()
    values = {(sample.metric, sample.labels): sample.value for sample in measure_copies(stage.copies)}
    assert values[metrics.HOST_KV_BYTES, ()] == 0
    for direction in ("to_host", "to_pool"):
        assert values[metrics.HOST_COPIES, (direction,)] == 1
        assert values[metrics.HOST_COPY_BYTES, (direction,)] == 2 * stage.copier.page_bytes
        seconds = values[metrics.HOST_COPY_SECONDS, (direction,)]
        assert isinstance(seconds, float)
        assert seconds > 0


# -- the stage's shell --


class HeardRing(RingOut):
    """Keeps what is said of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[tuple[int, int, bool]] = asyncio.Queue()

    def copied(self, handle: int, pp_rank: int, *, restored: bool) -> None:
        self.said.put_nowait((handle, pp_rank, restored))


def node_of(stage: Stage, pp_rank: int, ring: RingOut, tasks: Tasks) -> StageNode:
    executor = cast("Any", SimpleNamespace(num_queued=0))
    return StageNode(
        pp_rank,
        runner=stage.runner,
        executor=executor,
        ring=ring,
        tasks=tasks,
        kv=None,
        last=False,
        endpoint=cast("Any", SimpleNamespace(read_out=None)),
        checksums=cast("Any", None),
    )


def test_a_stage_says_what_is_copied_and_passes_on_what_others_say(stage: Stage) -> None:
    async def run() -> None:
        ring = HeardRing()
        node = node_of(stage, 2, ring, Tasks())
        stage.apply(joins=[1], pages={1: [0, 1]})
        stage.apply(retracts=(1,))
        assert {name for name, count in node.held.items() if count} == {"residents", "host_copies"}
        node.on_copied(8, 1, restored=True)
        assert await ring.said.get() == (8, 1, True)
        stage.copier.gate.set()
        assert await ring.said.get() == (1, 2, False)
        stage.apply(pages={1: [2, 3]}, resumes=(1,))
        assert await ring.said.get() == (1, 2, True)
        stage.apply(drops=(1,))
        assert not any(node.held.values())
        node.check_integrity()

    asyncio.run(run())


def test_a_stage_with_a_head_tells_it(stage: Stage) -> None:
    async def run() -> None:
        ring = HeardRing()
        node = node_of(stage, 0, ring, Tasks())
        node.head = cast("Any", SimpleNamespace(on_copied=ring.copied))
        stage.copier.gate.set()
        stage.apply(joins=[1], pages={1: [0]})
        stage.apply(retracts=(1,))
        assert await ring.said.get() == (1, 0, False)

    asyncio.run(run())


def test_a_copy_that_fails_ends_the_stage(stage: Stage) -> None:
    async def run() -> None:
        tasks = Tasks()
        node_of(stage, 0, HeardRing(), tasks)
        stage.copier.failure = MemoryError("no memory for a copy")
        stage.copier.gate.set()
        stage.apply(joins=[1], pages={1: [0]})
        stage.apply(retracts=(1,))
        with pytest.RaisesGroup(MemoryError):
            async with asyncio.timeout(LIMIT_S):
                await tasks.run()

    asyncio.run(run())
