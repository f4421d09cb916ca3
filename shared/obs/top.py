"""What `stagemesh top` shows: what two moments of a mesh say about the time between them. Pure.

processes --numbers and entries--> Moment, Moment --view--> View: the mesh, its instances, its stages, its requests
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.reading import Readings

NOTHING: Final = Readings(())


@dataclass(frozen=True, slots=True)
class Moment:
    """`at_s` is CLOCK_MONOTONIC. `readings` are by process, `entries` of the router and the broker; `silent` are
    processes that have not answered, and why."""

    at_s: float
    readings: Mapping[str, Readings]
    entries: tuple[Entry, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstanceView:
    """`microbatches` are those with a step out; `tokens_per_s` are new ones of decode, computed ones of prompts of
    prefill."""

    name: str
    role: str
    state: str
    running: int
    waiting: int
    microbatches: int
    tokens_per_s: float
    pages: Mapping[str, int]
    retractions: int


@dataclass(frozen=True, slots=True)
class StageView:
    """Shares of the time: `busy` it ran a step, in a `bubble` it could not, though sequences were there."""

    name: str
    steps_per_s: float
    busy: float
    bubble: float
    residents: int
    queued: int


@dataclass(frozen=True, slots=True)
class View:
    """`requests` are the oldest ones. Rates are over `seconds`."""

    seconds: float
    live: int
    waiting: Mapping[str, int]
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    tickets: Mapping[str, int]
    instances: tuple[InstanceView, ...]
    stages: tuple[StageView, ...]
    requests: tuple[Entry, ...]
    silent: Mapping[str, str]


class _Between:
    """How fast counters of a process grow. One that was started again counts from nothing: no rate is below zero."""

    def __init__(self, before: Readings, now: Readings, seconds: float) -> None:
        self._before, self.now, self._seconds = before, now, seconds

    def rate(self, metric: metrics.Metric, label: str | None = None) -> float:
        was, is_ = self._before.of(metric.name), self.now.of(metric.name)
        grown = sum(max(0.0, value - was.get(key, 0.0)) for key, value in is_.items() if label is None or key == label)
        return grown / self._seconds if self._seconds > 0 else 0.0

    def count(self, metric: metrics.Metric) -> int:
        return round(self.now.total(metric.name))

    def counts(self, metric: metrics.Metric) -> dict[str, int]:
        return {key: round(value) for key, value in self.now.of(metric.name).items()}


def view(before: Moment, now: Moment, most_requests: int) -> View:
    seconds = now.at_s - before.at_s
    between = {
        name: _Between(before.readings.get(name, readings), readings, seconds)
        for name, readings in now.readings.items()
    }
    router = between.get("router", _Between(NOTHING, NOTHING, seconds))
    broker = between.get("broker", _Between(NOTHING, NOTHING, seconds))
    stages = sorted(name for name in between if "/" in name)
    requests = sorted((entry for entry in now.entries if entry.kind == "request"), key=lambda entry: -entry.age_s)
    return View(
        seconds=seconds,
        live=router.count(metrics.LIVE_REQUESTS),
        waiting={reason: count for reason, count in router.counts(metrics.WAITING_REQUESTS).items() if count},
        tokens_per_s=router.rate(metrics.TOKENS, "generated"),
        prompt_tokens_per_s=router.rate(metrics.TOKENS, "prompt"),
        requests_per_s=router.rate(metrics.REQUESTS),
        tickets={state: count for state, count in broker.counts(metrics.TICKETS).items() if count},
        instances=tuple(_instance(entry, between) for entry in _instances(now)),
        stages=tuple(_stage(name, between[name]) for name in stages),
        requests=tuple(requests[:most_requests]),
        silent=dict(now.silent),
    )


def _instances(now: Moment) -> list[Entry]:
    return sorted((entry for entry in now.entries if entry.kind == "instance"), key=lambda entry: entry.name)


def _instance(entry: Entry, between: Mapping[str, _Between]) -> InstanceView:
    head = between.get(f"{entry.name}/0", _Between(NOTHING, NOTHING, 0.0))
    states = head.counts(metrics.SEQUENCES)
    running = states.get("running", 0)
    over = states.get("finished", 0) + states.get("aborted", 0)
    decoded, computed = head.rate(metrics.DECODED_TOKENS), head.rate(metrics.PREFILL_TOKENS, "computed")
    return InstanceView(
        name=entry.name,
        role=str(entry.details.get("role", "")),
        state=entry.state,
        running=running,
        waiting=sum(states.values()) - running - over,
        microbatches=head.count(metrics.MICROBATCHES) or head.count(metrics.STEPS_OUTSTANDING),
        tokens_per_s=decoded + computed,
        pages=head.counts(metrics.PAGES),
        retractions=head.count(metrics.RETRACTIONS) + head.count(metrics.RECOMPUTED),
    )


def _stage(name: str, between: _Between) -> StageView:
    return StageView(
        name=name,
        steps_per_s=between.rate(metrics.STAGE_STEPS),
        busy=min(1.0, between.rate(metrics.FORWARD_SECONDS)),
        bubble=min(1.0, between.rate(metrics.BUBBLE_SECONDS)),
        residents=between.count(metrics.RESIDENTS),
        queued=between.count(metrics.QUEUED_COMMANDS),
    )
