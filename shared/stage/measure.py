"""The numbers of a stage and of the head that it may host, as samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from stagemesh.shared.engine.host_copies import HostCopies
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.schedule.stats import DecodeStats
from stagemesh.shared.engine.schedule.waiting import Reason, Waiting
from stagemesh.shared.fsm.sequence import SEQUENCE, SequenceState
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


def measure_copies(copies: HostCopies) -> Iterator[Sample]:
    """KV of retracted sequences."""
    yield Sample(metrics.HOST_KV_BYTES, copies.num_bytes)
    for direction, counts in copies.counts.items():
        labels = (direction.value,)
        yield Sample(metrics.HOST_COPIES, counts.copies, labels)
        yield Sample(metrics.HOST_COPY_BYTES, counts.num_bytes, labels)
        yield Sample(metrics.HOST_COPY_SECONDS, counts.seconds, labels)


def measure_kv(counts: KvCounts) -> Iterator[Sample]:
    yield Sample(metrics.KV_BYTES, counts.num_bytes)
    yield Sample(metrics.KV_PIECES, counts.pieces)
    yield Sample(metrics.KV_SECONDS, counts.seconds)
    yield Sample(metrics.KV_IN_DOUBT, counts.in_doubt)
    yield from by_label(metrics.KV_WRITES, {state.value: count for state, count in counts.by_state.items()})


class Aged(Protocol):
    """A sequence, whatever its role. `arrived_s` is CLOCK_MONOTONIC, of its arrival at its router."""

    @property
    def state(self) -> SequenceState: ...

    @property
    def arrived_s(self) -> float: ...


def measure_ages(sequences: Iterable[Aged], now_s: float) -> Iterator[Sample]:
    """`now_s` is CLOCK_MONOTONIC."""
    ages = dict.fromkeys((state.value for state in SequenceState if state not in SEQUENCE.terminal), 0.0)
    for sequence in sequences:
        if sequence.state not in SEQUENCE.terminal:
            ages[sequence.state.value] = max(ages[sequence.state.value], now_s - sequence.arrived_s)
    yield from by_label(metrics.OLDEST_SEQUENCE, ages)


def measure_waiting(waits: Mapping[Reason, Waiting]) -> Iterator[Sample]:
    yield from by_label(metrics.WAITING_SEQUENCES, {reason.value: wait.count for reason, wait in waits.items()})
    yield from by_label(metrics.LONGEST_WAIT, {reason.value: wait.oldest_s for reason, wait in waits.items()})


def measure_pressure(stats: DecodeStats, host_pages: int, host_pages_used: int) -> Iterator[Sample]:
    """What a decode head does when pages run out."""
    yield Sample(metrics.RETRACTIONS, stats.retractions)
    yield Sample(metrics.RESUMED, stats.resumed)
    yield Sample(metrics.RETRACTED_SECONDS, stats.retracted.snapshot())
    yield Sample(metrics.RECOMPUTED, stats.recomputed)
    yield Sample(metrics.LOST_TOKENS, stats.recomputed_tokens)
    yield Sample(metrics.TAKEN_BACK, stats.reservations_cancelled)
    yield Sample(metrics.STALLED_ROWS, stats.stalled_rows)
    yield Sample(metrics.PREDICTED_TOKENS, stats.predicted_tokens.snapshot())
    yield Sample(metrics.TRUE_TOKENS, stats.true_tokens.snapshot())
    yield from by_label(metrics.HOST_PAGES, {"used": host_pages_used, "free": host_pages - host_pages_used})


def measure_scheduling(pages: PageAllocator, issuer: Issuer, by_state: Mapping[str, int]) -> Iterator[Sample]:
    """What the schedulers of both roles have."""
    yield Sample(metrics.POOL_PAGES, pages.num_pages)
    states = {"free": pages.num_free, "used": pages.num_used, "cached": pages.num_cached}
    states["quarantined"] = pages.num_quarantined
    yield from by_label(metrics.PAGES, states)
    yield from by_label(metrics.SEQUENCES, by_state)
    yield Sample(metrics.STEPS_ISSUED, issuer.steps_issued)
    yield Sample(metrics.STEPS_OUTSTANDING, len(issuer.outstanding))
    yield Sample(metrics.COMMANDS_UNACKNOWLEDGED, issuer.unacknowledged)
