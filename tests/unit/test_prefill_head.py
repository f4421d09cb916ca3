"""The head of a prefill instance: what it takes from submits, and its cache as others see it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stagemesh.services.prefill.head import PrefillHead
from stagemesh.shared.codec.arrays import to_bytes
from stagemesh.shared.core.commands import HANDLE, SAMPLE, Command
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import instance_pb2
from tests.support.instances import PREFILL, instance_of

VOCAB = 100


class Stage:
    """All there is of an instance but its head. A step's result is back at once."""

    def __init__(self) -> None:
        self.scheduler = PrefillScheduler(
            num_pages=16, page_size=4, pp_size=1, chunk_size=8, max_sequences=4, reserve_ahead=1, run_ahead=0
        )
        context = SimpleNamespace(
            info=instance_of("p", PREFILL),
            log=Log(logging.getLogger("stagemesh.test")),
            vocab_size=VOCAB,
            issue=self._issue,
            tracer=Tracer("p/0"),
        )
        self.head = PrefillHead(cast("Any", context), self.scheduler)
        self.order: list[int] = []

    def _issue(self, command: Command) -> None:
        if command.step is None:
            self.head.on_applied(command.number)
            return
        rows = command.step.rows
        self.order += rows[:, HANDLE].tolist()
        self.head.on_result(command.step.number, np.where(rows[:, -1] & SAMPLE, 7, -1), {})

    def submit(self, name: str, token_ids: Sequence[int], **standing: Any) -> None:
        ref = instance_pb2.RequestRef(request_id=name, attempt=1)
        sampling = instance_pb2.Sampling(max_tokens=1, top_p=1.0)
        ids = to_bytes(token_ids)
        self.head.on_submit(instance_pb2.SessionUp.Submit(request=ref, sampling=sampling, token_ids=ids, **standing))

    async def run_dry(self) -> None:
        await self.head.idle()
        assert not any(self.head.held.values())
        self.head.check_integrity()


def test_priority_waiting_and_recompute_reach_the_scheduler() -> None:
    async def run() -> list[int]:
        stage = Stage()
        stage.submit("plain", range(8))
        stage.submit("urgent", range(10, 18), priority=5)
        stage.submit("old", range(20, 28), waited_s=51.0)
        stage.submit("lost", range(30, 38), recompute=True, priority=-100)
        await stage.run_dry()
        return stage.order

    assert asyncio.run(run()) == [4, 3, 2, 1]


@pytest.mark.parametrize("waited_s", [-1.0, math.nan, math.inf])
def test_a_wait_that_is_no_time_is_refused(waited_s: float) -> None:
    async def run() -> int:
        stage = Stage()
        stage.submit("r", range(8), waited_s=waited_s)
        return stage.head.held["sequences"]

    assert asyncio.run(run()) == 0


def test_cached_pages_are_shown_not_held_and_can_be_flushed() -> None:
    async def run() -> None:
        stage = Stage()
        stage.submit("one", range(13))
        await stage.run_dry()
        stage.submit("other", range(13))
        await stage.run_dry()
        assert stage.head.gauges == {"pages_cached": 3}
        assert stage.head.load.pages_free == 16
        shown = {(sample.metric, sample.labels): sample.value for sample in stage.head.measure()}
        states = {"free": 13, "used": 0, "cached": 3, "quarantined": 0}
        assert {state: shown[metrics.PAGES, (state,)] for state in states} == states
        assert [shown[metrics.PREFILL_TOKENS, (how,)] for how in ("cached", "computed")] == [12, 14]
        assert stage.head.flush_cache() == 3
        assert stage.head.gauges == {"pages_cached": 0}
        assert stage.head.flush_cache() == 0
        stage.submit("again", range(13))
        await stage.run_dry()
        assert stage.scheduler.stats.cached_tokens == 12
        assert stage.scheduler.evicted_pages == 3

    asyncio.run(run())
