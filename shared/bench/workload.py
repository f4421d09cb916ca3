"""What is sent and when: a pure function of its parameters. However many processes share a workload, it is the same."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from stagemesh.shared.core.commands import Ints
from stagemesh.shared.errors import Rejected

_LENGTHS, _ARRIVALS, _PROMPT = range(3)  # random streams of their own, so that none shifts another
MAX_SEED: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in tokens and uniform in [range_ratio x length, length]. `request_rate` is requests a second, with
    Poisson arrivals; inf means all at once. Raises Rejected naming what is out of range."""

    num_prompts: int
    input_len: int
    output_len: int
    vocab_size: int
    range_ratio: float = 1.0
    request_rate: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise Rejected(name, f"must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.range_ratio <= 1.0:
            raise Rejected("range_ratio", f"must be in 0..1, got {self.range_ratio}")
        if not self.request_rate > 0.0:
            raise Rejected("request_rate", f"must be above 0, or inf, got {self.request_rate}")
        if not 0 <= self.seed <= MAX_SEED:
            raise Rejected("seed", f"must be in 0..{MAX_SEED}, got {self.seed}")

    def check_fits(self, max_request_tokens: int) -> None:
        """Raises Rejected if the longest request is more than the mesh can ever hold."""
        if self.input_len + self.output_len > max_request_tokens:
            raise Rejected(
                "input_len",
                f"{self.input_len} and {self.output_len} new tokens are more than a request may have, which is "
                f"{max_request_tokens} tokens (context and page pool)",
            )

    def random(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRequest:
    """`token_ids` int64 [input tokens]; `arrival_s` in seconds after the start."""

    index: int
    arrival_s: float
    token_ids: Ints
    output_tokens: int


def plan(workload: Workload, process: int = 0, num_processes: int = 1) -> list[PlannedRequest]:
    """The requests of one of `num_processes` processes, in order of arrival: every `num_processes`-th one."""
    lengths = workload.random(_LENGTHS)
    inputs = _lengths(lengths, workload.input_len, workload)
    outputs = _lengths(lengths, workload.output_len, workload)
    arrivals = _arrivals(workload)
    return [
        PlannedRequest(index, float(arrivals[index]), _prompt(workload, index, int(inputs[index])), int(outputs[index]))
        for index in range(process, workload.num_prompts, num_processes)
    ]


def share(total: int, process: int, num_processes: int) -> int:
    """What one process gets of `total` indivisible things; the shares add up."""
    return total // num_processes + (process < total % num_processes)


def _lengths(random: np.random.Generator, longest: int, workload: Workload) -> Ints:
    shortest = max(1, round(workload.range_ratio * longest))
    return random.integers(shortest, longest, size=workload.num_prompts, endpoint=True, dtype=np.int64)


def _arrivals(workload: Workload) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds, ascending; the first is 0."""
    if workload.request_rate == inf:
        return np.zeros(workload.num_prompts)
    gaps = workload.random(_ARRIVALS).exponential(1.0 / workload.request_rate, size=workload.num_prompts)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def _prompt(workload: Workload, index: int, length: int) -> Ints:
    return workload.random(_PROMPT, index).integers(0, workload.vocab_size, size=length, dtype=np.int64)
