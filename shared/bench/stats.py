"""The figures of a benchmark. Pure: a function of the records.

Throughput, concurrency and all times are of the successful requests alone; what failed ones brought is counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from stagemesh.shared.bench.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """In seconds; NaN where there is no sample. Percentiles are interpolated linearly between the two nearest."""

    mean: float = nan
    median: float = nan
    p90: float = nan
    p99: float = nan
    max: float = nan


@dataclass(frozen=True, slots=True)
class Summary:
    """`concurrency` is the sum of the end-to-end times over the duration. `failures` are reasons with their counts, the
    most frequent first. `cached_tokens` of the input were not computed."""

    successful: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    failed_output_tokens: int
    concurrency: float
    latency: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    failures: tuple[tuple[str, int], ...] = ()
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def rate(self, count: float) -> float:
        """`count` a second; 0 where no time has passed."""
        return count / self.duration_s if self.duration_s > 0.0 else 0.0

    @property
    def throughput(self) -> dict[str, float]:
        """Successful requests, their output tokens and all their tokens a second."""
        return {
            "requests_per_s": self.rate(self.successful),
            "output_tokens_per_s": self.rate(self.output_tokens),
            "total_tokens_per_s": self.rate(self.total_tokens),
        }


def spread(samples: Sequence[float]) -> Spread:
    if not samples:
        return Spread()
    values = np.asarray(samples, dtype=np.float64)
    median, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Spread(float(values.mean()), median, p90, p99, float(values.max()))


def summarize(records: Iterable[RequestRecord]) -> Summary:
    """The duration is from the start, which is the first arrival, to the end of the last request of all."""
    everything = list(records)
    good = [record for record in everything if not record.failure]
    bad = [record for record in everything if record.failure]
    duration_s = max((record.end_s for record in everything), default=0.0)
    latencies = [record.latency_s for record in good]
    return Summary(
        successful=len(good),
        failed=len(bad),
        duration_s=duration_s,
        input_tokens=sum(record.input_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        failed_output_tokens=sum(record.output_tokens for record in bad),
        concurrency=sum(latencies) / duration_s if duration_s > 0.0 else 0.0,
        latency=spread(latencies),
        ttft=spread([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot=spread([record.tpot_s for record in good if record.tpot_s is not None]),
        itl=spread([gap for record in good for gap in record.itl_s]),
        failures=tuple(Counter(record.failure for record in bad).most_common()),
        cached_tokens=sum(record.cached_tokens for record in good),
    )
