"""The numbers of a stage and of the head that it may host, as samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.metrics import Sample, by_label
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.kv_sender import KvCounts
from stagemesh.shared.stage.occupancy import Activity


def measure_stage(runner: StageRunner, executor: StageExecutor, now_ns: int) -> Iterator[Sample]:
    """`now_ns` is CLOCK_MONOTONIC."""
    yield Sample(metrics.STAGE_STEPS, executor.steps_done)
    yield Sample(metrics.FORWARD_SECONDS, executor.occupancy.seconds(Activity.FORWARD, now_ns))
    yield Sample(metrics.BUBBLE_SECONDS, executor.occupancy.seconds(Activity.STARVED, now_ns))
    yield Sample(metrics.HOPS, executor.hops_done)
    yield Sample(metrics.HOP_SECONDS, executor.hop_ns / 1e9)
    yield Sample(metrics.RESIDENTS, runner.num_residents)
    yield Sample(metrics.QUEUED_COMMANDS, executor.num_queued)


def measure_kv(counts: KvCounts) -> Iterator[Sample]:
    yield Sample(metrics.KV_BYTES, counts.num_bytes)
    yield Sample(metrics.KV_PIECES, counts.pieces)
    yield Sample(metrics.KV_SECONDS, counts.seconds)
    yield Sample(metrics.KV_IN_DOUBT, counts.in_doubt)
    yield from by_label(metrics.KV_WRITES, {state.value: count for state, count in counts.by_state.items()})


def measure_scheduling(pages: PageAllocator, issuer: Issuer, by_state: Mapping[str, int]) -> Iterator[Sample]:
    """What the schedulers of both roles have."""
    yield Sample(metrics.POOL_PAGES, pages.num_pages)
    states = {"free": pages.num_free, "used": pages.num_used, "quarantined": pages.num_quarantined}
    yield from by_label(metrics.PAGES, states)
    yield from by_label(metrics.SEQUENCES, by_state)
    yield Sample(metrics.STEPS_ISSUED, issuer.steps_issued)
    yield Sample(metrics.STEPS_OUTSTANDING, len(issuer.outstanding))
    yield Sample(metrics.COMMANDS_UNACKNOWLEDGED, issuer.unacknowledged)
