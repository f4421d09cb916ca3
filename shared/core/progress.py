"""What a stage says of its progress, and how long it may stand still with work to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STANDSTILL_S: Final = 3.0
STEPS: Final = 5.0
"""So many times what a step is expected to take, and never less than STANDSTILL_S, is a standstill."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """`step_s` is what a step is expected to take there at most. `has_work`: commands are there, or are being run."""

    pp_rank: int
    steps_done: int
    has_work: bool
    step_s: float


def patience_s(step_s: float) -> float:
    """How long a stage may stand still whose step is expected to take `step_s` at most."""
    return max(STANDSTILL_S, STEPS * step_s)
