"""Whether the stages of instances make progress, by what their heads report. Pure; seconds of one clock.

a stage that has work while its counter stands still for too long --> stuck, and its instance is lost
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.progress import StageProgress, patience_s


@dataclass(frozen=True, slots=True)
class _Seen:
    steps_done: int
    since_s: float


class ProgressWatch:
    """Of all instances. One stage may wait for another's step, so the slowest of an instance sets its patience."""

    def __init__(self) -> None:
        self._seen: dict[InstanceRef, dict[int, _Seen]] = {}

    def stuck(self, ref: InstanceRef, progress: Iterable[StageProgress], now_s: float) -> str:
        """In words, which stage of `ref` stands still; empty if none does."""
        stages, seen = tuple(progress), self._seen.setdefault(ref, {})
        patience = patience_s(max((stage.step_s for stage in stages), default=0.0))
        found = ""
        for stage in stages:
            before = seen.get(stage.pp_rank)
            if before is None or not stage.has_work or before.steps_done != stage.steps_done:
                seen[stage.pp_rank] = _Seen(stage.steps_done, now_s)
            elif (still_s := now_s - before.since_s) >= patience:
                found = found or f"stage {stage.pp_rank} has stood still at step {stage.steps_done} for {still_s:.1f} s"
        return found

    def excuse(self) -> None:
        """Nobody has watched for a while: all begin anew."""
        self._seen.clear()

    def forget(self, ref: InstanceRef) -> None:
        self._seen.pop(ref, None)
