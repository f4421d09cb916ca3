"""What operators may change of a decode scheduler while it runs. Each takes effect with the next poll."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from stagemesh.shared.engine.schedule.decode_core import DecodeCore
from stagemesh.shared.engine.schedule.decode_memory import DecodeMemory
from stagemesh.shared.errors import Rejected


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What the stages were built for: steps that may be out at once, rows of a step, sequences of the instance."""

    steps: int
    rows: int
    sequences: int


class DecodeSettings:
    """By name. Without `room` there is no upper limit: a scheduler without stages."""

    def __init__(
        self, core: DecodeCore, memory: DecodeMemory, *, pp_size: int, run_ahead: int, room: StepRoom | None
    ) -> None:
        self._core, self._memory = core, memory
        self._pp_size, self._run_ahead, self._room = pp_size, run_ahead, room
        self._setters: Final[Mapping[str, Callable[[float], None]]] = {
            "schedule_conservativeness": core.growth.set_conservativeness,
            "extra_depth": self._set_extra_depth,
            "max_running": self._set_max_running,
        }

    @property
    def values(self) -> Mapping[str, float]:
        return {
            "schedule_conservativeness": self._core.growth.conservativeness,
            "extra_depth": len(self._core.microbatches.sizes) - self._pp_size,
            "max_running": self._memory.max_running,
        }

    def set(self, name: str, value: float) -> float:
        """Returns what it was. Raises Rejected for a setting that there is not, or a value out of its limits."""
        if name not in self._setters:
            raise Rejected("setting", f"must be one of {', '.join(self._setters)}, got {name!r}")
        previous = self.values[name]
        self._setters[name](value)
        return previous

    def _set_extra_depth(self, value: float) -> None:
        most = None if self._room is None else self._room.steps - self._run_ahead - self._pp_size
        count = self._pp_size + _whole("extra_depth", value, 0, most, "engine.ring_slots holds no more")
        self._check_rows("extra_depth", count, self._memory.max_running)
        self._core.microbatches.resize(count, lambda handle: self._core.sequences.of_handle(handle).in_flight)

    def _set_max_running(self, value: float) -> None:
        most = None if self._room is None else self._room.sequences
        wanted = _whole("max_running", value, 1, most, "the stages were started for no more")
        self._check_rows("max_running", len(self._core.microbatches.sizes), wanted)
        self._memory.max_running = wanted

    def _check_rows(self, name: str, num_microbatches: int, max_running: int) -> None:
        """A microbatch of the most that there may be is a step's rows. Those that run already, or will with the
        pages that they have, may be more than may run from now on."""
        active = sum(1 for sequence in self._core.sequences if sequence.active)
        most = max(max_running, active, sum(self._core.microbatches.sizes))
        rows = -(-most // num_microbatches)
        if self._room is not None and rows > self._room.rows:
            what = f"{most} sequences in {num_microbatches} microbatches are {rows} rows a step"
            raise Rejected(name, f"{what}, and a stage takes {self._room.rows}")


def _whole(name: str, value: float, least: int, most: int | None, why: str) -> int:
    """Raises Rejected unless it is a whole number in [least, most]."""
    limit = f"{least} or more" if most is None else f"in {least}..{most}: {why}"
    if not math.isfinite(value) or value != int(value) or value < least or (most is not None and value > most):
        raise Rejected(name, f"must be a whole number {limit}, got {value:g}")
    return int(value)
