"""What schedulers count, for people and metrics: no decision depends on it. Waits are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

from stagemesh.shared.obs.tally import Tally

WAIT_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SIZE_BOUNDS: Final = tuple(1 << power for power in range(14))  # 1..8192 rows or tokens

waits = partial(Tally, WAIT_BOUNDS_S)
sizes = partial(Tally, SIZE_BOUNDS)


@dataclass(slots=True)
class PrefillStats:
    """`prefill` is from a prompt's first chunk to its first token."""

    reserve_wait: Tally = field(default_factory=waits)
    prefill: Tally = field(default_factory=waits)
    chunk_tokens: Tally = field(default_factory=sizes)


@dataclass(slots=True)
class DecodeStats:
    """`first_step_wait` is from a ticket's commit; `wasted_rows` came back for a sequence that was over."""

    reserve_wait: Tally = field(default_factory=waits)
    first_step_wait: Tally = field(default_factory=waits)
    step_rows: Tally = field(default_factory=sizes)
    decoded_tokens: int = 0
    wasted_rows: int = 0
