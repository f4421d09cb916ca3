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
    """`prefill` is from a prompt's first chunk to its first token. The tokens are those of prompts that have started;
    `cached_tokens` of them had their KV here before."""

    reserve_wait: Tally = field(default_factory=waits)
    prefill: Tally = field(default_factory=waits)
    chunk_tokens: Tally = field(default_factory=sizes)
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class DecodeStats:
    """`first_step_wait` is from a ticket's commit; `wasted_rows` came back for a sequence that was over; `stalled_rows`
    were left out of a step for want of a page. `retracted` is from a retraction until the sequence may run again, of
    those that did. `recomputed` sequences lost the KV of `recomputed_tokens`: host memory was full. `predicted_tokens`
    are the new tokens that were expected of a sequence when it was admitted, `true_tokens` those that it had when it
    finished."""

    reserve_wait: Tally = field(default_factory=waits)
    first_step_wait: Tally = field(default_factory=waits)
    step_rows: Tally = field(default_factory=sizes)
    decoded_tokens: int = 0
    wasted_rows: int = 0
    stalled_rows: int = 0
    retractions: int = 0
    resumed: int = 0
    retracted: Tally = field(default_factory=waits)
    recomputed: int = 0
    recomputed_tokens: int = 0
    reservations_cancelled: int = 0
    predicted_tokens: Tally = field(default_factory=sizes)
    true_tokens: Tally = field(default_factory=sizes)

    def finished(self, predicted: int, true: int) -> None:
        self.predicted_tokens.record(predicted)
        self.true_tokens.record(true)
