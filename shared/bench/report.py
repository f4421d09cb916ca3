"""A summary for people (a table) and for programs (JSON). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isinf, isnan
from typing import Any, Final

import msgspec

from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.records import RequestRecord
from stagemesh.shared.bench.stats import Spread, Summary

MAX_REASONS: Final = 20
LAG_WARNING_S: Final = 0.05
_LABEL, _NUMBER = 36, 12


def table(summary: Summary, max_lag_s: float, num_processes: int) -> str:
    """Lines of a label and a figure, one line a kind of time, in milliseconds, and why requests failed."""
    blocks = (_counts(summary), _times(summary), [_client(max_lag_s, num_processes)], failure_lines(summary))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def failure_lines(summary: Summary) -> list[str]:
    """Why requests failed, the most frequent reason first; empty if none did."""
    if not summary.failed:
        return []
    lines = [f"{summary.failed} requests failed:"]
    lines += [f"{count:>8} x {reason}" for reason, count in summary.failures[:MAX_REASONS]]
    if left := summary.failures[MAX_REASONS:]:
        lines.append(f"{sum(count for _, count in left):>8} x {len(left)} other reasons")
    return lines


def lag_warning(max_lag_s: float, num_processes: int) -> str | None:
    """What to say if the clients were too slow to measure; None if they were not."""
    if max_lag_s <= LAG_WARNING_S:
        return None
    return (
        f"the client's own event loop lagged up to {max_lag_s * 1e3:.0f} ms, so the times above are partly its own; "
        f"raise --processes (it was {num_processes}), or give the client more CPU"
    )


def to_json(summary: Summary, records: Sequence[RequestRecord], load: Load, max_lag_s: float) -> bytes:
    """All figures, in seconds, and every request's record. What has no samples is null."""
    document = {
        "settings": _settings(load),
        "summary": {**asdict(summary), "total_tokens": summary.total_tokens, **summary.throughput},
        "client": {"max_loop_lag_s": max_lag_s, "processes": load.num_processes},
        "requests": [_request(record) for record in records],
    }
    return msgspec.json.encode(document)


def _settings(load: Load) -> dict[str, Any]:
    settings = asdict(load)
    if isinf(load.workload.request_rate):
        settings["workload"]["request_rate"] = "inf"  # JSON has no such number
    return settings


def _request(record: RequestRecord) -> dict[str, Any]:
    derived = {
        "output_tokens": record.output_tokens,
        "latency_s": record.latency_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
    }
    # asdict would copy every time of every message one by one
    return {name: getattr(record, name) for name in RequestRecord.__dataclass_fields__} | derived


def _counts(summary: Summary) -> list[str]:
    throughput = summary.throughput
    cached = [_line("Input tokens found cached", f"{summary.cached_tokens}")] if summary.cached_tokens else []
    wasted = [_line("Output tokens of failed requests", f"{summary.failed_output_tokens}")] if summary.failed else []
    return [
        _line("Successful requests", f"{summary.successful}"),
        _line("Failed requests", f"{summary.failed}"),
        _line("Benchmark duration (s)", f"{summary.duration_s:.2f}"),
        _line("Input tokens", f"{summary.input_tokens}"),
        *cached,
        _line("Output tokens", f"{summary.output_tokens}"),
        _line("Total tokens", f"{summary.total_tokens}"),
        *wasted,
        _line("Request throughput (req/s)", f"{throughput['requests_per_s']:.2f}"),
        _line("Output token throughput (tok/s)", f"{throughput['output_tokens_per_s']:.2f}"),
        _line("Total token throughput (tok/s)", f"{throughput['total_tokens_per_s']:.2f}"),
        _line("Concurrency", f"{summary.concurrency:.2f}"),
    ]


def _times(summary: Summary) -> list[str]:
    return [
        _line("Milliseconds", *("mean", "median", "P90", "P99", "max")),
        _spread_line("End-to-end latency", summary.latency),
        _spread_line("Time to first token (TTFT)", summary.ttft),
        _spread_line("Time per output token (TPOT)", summary.tpot),
        _spread_line("Inter-token latency (ITL)", summary.itl),
    ]


def _client(max_lag_s: float, num_processes: int) -> str:
    return _line(f"Max client loop lag (ms, {num_processes} proc.)", f"{max_lag_s * 1e3:.2f}")


def _spread_line(label: str, times: Spread) -> str:
    figures = (times.mean, times.median, times.p90, times.p99, times.max)
    return _line(label, *("-" if isnan(figure) else f"{figure * 1e3:.2f}" for figure in figures))


def _line(label: str, *figures: str) -> str:
    return f"{label:<{_LABEL}}" + "".join(f"{figure:>{_NUMBER}}" for figure in figures)
