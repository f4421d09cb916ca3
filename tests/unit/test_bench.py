"""The load generator: the same workload from the same seed, figures that agree with the standard library's and
count only what was received."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.bench.frames import Load
from stagemesh.shared.bench.records import RequestRecord, failure_of
from stagemesh.shared.bench.report import LAG_WARNING_S, MAX_REASONS, failure_lines, lag_warning, table, to_json
from stagemesh.shared.bench.stats import spread, summarize
from stagemesh.shared.bench.workload import Workload, plan, share
from stagemesh.shared.errors import Rejected

VOCAB = 320


def record(index: int, *messages: tuple[float, int], failure: str = "", **changes: Any) -> RequestRecord:
    """`messages` are (seconds after the start, tokens)."""
    fields: dict[str, Any] = {
        "index": index,
        "input_tokens": 10,
        "wanted_tokens": sum(count for _, count in messages),
        "arrival_s": 0.0,
        "sent_s": 0.0,
        "end_s": messages[-1][0] if messages else 0.0,
        "message_s": tuple(at_s for at_s, _ in messages),
        "message_tokens": tuple(count for _, count in messages),
    }
    return RequestRecord(**{**fields, **changes}, failure=failure)


# -- the workload --

workloads = st.builds(
    Workload,
    num_prompts=st.integers(1, 40),
    input_len=st.integers(1, 50),
    output_len=st.integers(1, 50),
    vocab_size=st.integers(1, 1000),
    range_ratio=st.floats(0, 1),
    request_rate=st.one_of(st.just(math.inf), st.floats(0.01, 1000)),
    seed=st.integers(0, 1 << 40),
)


@settings(deadline=None)
@given(workloads, st.integers(1, 8))
def test_a_seed_makes_the_same_workload_whatever_the_number_of_processes(workload: Workload, processes: int) -> None:
    alone = plan(workload)
    shared = sorted((r for p in range(processes) for r in plan(workload, p, processes)), key=lambda r: r.index)
    assert [r.index for r in alone] == list(range(workload.num_prompts))
    for one, other in zip(alone, shared, strict=True):
        assert (one.index, one.arrival_s, one.output_tokens) == (other.index, other.arrival_s, other.output_tokens)
        assert np.array_equal(one.token_ids, other.token_ids)


@settings(deadline=None)
@given(workloads)
def test_a_workload_keeps_its_bounds(workload: Workload) -> None:
    planned = plan(workload)
    for request in planned:
        assert max(1, round(workload.range_ratio * workload.input_len)) <= len(request.token_ids) <= workload.input_len
        shortest = max(1, round(workload.range_ratio * workload.output_len))
        assert shortest <= request.output_tokens <= workload.output_len
        assert 0 <= request.token_ids.min() <= request.token_ids.max() < workload.vocab_size
    assert planned[0].arrival_s == 0.0
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(planned))
    if workload.request_rate == math.inf:
        assert planned[-1].arrival_s == 0.0


def test_another_seed_makes_another_workload() -> None:
    one, other = (plan(Workload(20, 40, 40, VOCAB, 0.1, 5.0, seed)) for seed in (1, 2))
    assert [r.output_tokens for r in one] != [r.output_tokens for r in other]
    assert [r.arrival_s for r in one] != [r.arrival_s for r in other]
    assert not any(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(one, other, strict=True))


def test_lengths_and_arrivals_are_distributed_as_asked() -> None:
    planned = plan(Workload(4000, 20, 100, VOCAB, 0.5, 50.0))
    assert {len(r.token_ids) for r in planned} == set(range(10, 21))
    assert statistics.mean(r.output_tokens for r in planned) == pytest.approx(75, abs=2)
    gaps = [other.arrival_s - one.arrival_s for one, other in pairwise(planned)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(0.02, rel=0.1)  # of an exponential, its mean


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompts", 0),
        ("input_len", 0),
        ("output_len", -1),
        ("range_ratio", 1.5),
        ("range_ratio", math.nan),
        ("request_rate", 0.0),
        ("request_rate", math.nan),
        ("seed", -1),
    ],
)
def test_what_is_out_of_range_is_named(field: str, value: float) -> None:
    fields: dict[str, Any] = {"num_prompts": 1, "input_len": 1, "output_len": 1, "vocab_size": VOCAB, field: value}
    with pytest.raises(Rejected, match=f"^{field}: must be"):
        Workload(**fields)


def test_requests_that_can_never_fit_are_refused_before_any_is_sent() -> None:
    workload = Workload(1, 400, 113, VOCAB)
    workload.check_fits(513)
    with pytest.raises(Rejected, match=r"input_len: 400 and 113 new tokens are more than .* 512 tokens"):
        workload.check_fits(512)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_add_up_and_are_even(total: int, processes: int) -> None:
    shares = [share(total, process, processes) for process in range(processes)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


# -- the figures --


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_spreads_agree_with_the_standard_library(samples: list[float]) -> None:
    found = spread(samples)
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    expected = (statistics.fmean(samples), statistics.median(samples), cuts[89], cuts[98], max(samples))
    assert (found.mean, found.median, found.p90, found.p99, found.max) == pytest.approx(expected, abs=1e-9)


messages = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), min_size=1, max_size=30)


@given(messages, st.floats(0, 1))
def test_inter_token_latencies_are_one_a_token_and_add_up(steps: list[tuple[float, int]], arrival_s: float) -> None:
    at_s, timed = arrival_s, []
    for gap_s, count in steps:
        at_s += gap_s
        timed.append((at_s, count))
    made = record(0, *timed, arrival_s=arrival_s)
    assert made.output_tokens == sum(count for _, count in steps)
    assert len(made.itl_s) == made.output_tokens - 1
    assert sum(made.itl_s) == pytest.approx(timed[-1][0] - timed[0][0])
    assert made.ttft_s == pytest.approx(steps[0][0])
    if made.output_tokens > 1:
        assert made.tpot_s == pytest.approx(sum(made.itl_s) / (made.output_tokens - 1))
    else:
        assert made.tpot_s is None


def test_tokens_that_share_a_message_share_its_gap() -> None:
    assert record(0, (1.0, 2), (1.5, 1), (3.0, 3)).itl_s == [0.0, 0.5, 1.5, 0.0, 0.0]
    assert record(0).itl_s == []


def test_the_clock_runs_while_a_request_waits_for_a_slot() -> None:
    made = record(0, (5.0, 1), (6.0, 1), arrival_s=1.0, sent_s=4.0)
    assert (made.ttft_s, made.latency_s, made.tpot_s) == (4.0, 5.0, 1.0)


def test_a_summary_counts_successes_and_lists_failures() -> None:
    records = [
        record(0, (1.0, 1), (2.0, 1)),
        record(1, (1.0, 1), (4.0, 3)),
        record(2, (1.0, 7), end_s=8.0, failure="lost"),
        record(3, failure="refused"),
        record(4, failure="lost"),
    ]
    found = summarize(records)
    assert (found.successful, found.failed, found.duration_s) == (2, 3, 8.0)
    assert (found.input_tokens, found.output_tokens, found.total_tokens, found.failed_output_tokens) == (20, 6, 26, 7)
    assert found.concurrency == (2.0 + 4.0) / 8.0
    assert found.throughput == {"requests_per_s": 0.25, "output_tokens_per_s": 0.75, "total_tokens_per_s": 3.25}
    assert found.failures == (("lost", 2), ("refused", 1))
    assert (found.latency.mean, found.ttft.mean, found.tpot.mean, found.itl.max) == (3.0, 1.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"finish_reason": "stop"}, "ended with finish_reason stop"),
        ({"finish_reason": "abort"}, "ended with finish_reason abort"),
        ({"received": 4}, "fewer tokens received than asked for"),
        ({"received": 6}, "more tokens received than asked for"),
        ({"reported": 6}, "usage reports another number of tokens than was received"),
        ({"reported_input": 1}, "usage reports another number of prompt tokens than was sent"),
    ],
)
def test_only_exactly_what_was_asked_for_is_a_success(changes: dict[str, Any], says: str) -> None:
    fields: dict[str, Any] = {"finish_reason": "length", "received": 5, "wanted": 5, "reported": 5}
    fields |= {"input_tokens": 9, "reported_input": 9} | changes
    assert failure_of(**fields) == says


# -- the report --

LOAD = Load("127.0.0.1:1", Workload(2, 10, 4, VOCAB), num_processes=3, max_concurrency=7)


def test_the_table_has_every_figure() -> None:
    records = [record(0, (0.25, 1), (0.5, 1)), record(1, (1.0, 1), (2.0, 3))]
    lines = [line.split() for line in table(summarize(records), 0.0125, 3).splitlines()]
    assert ["Output", "token", "throughput", "(tok/s)", "3.00"] in lines
    assert ["Concurrency", "1.25"] in lines
    assert ["Time", "to", "first", "token", "(TTFT)", "625.00", "625.00", "925.00", "992.50", "1000.00"] in lines
    assert ["Max", "client", "loop", "lag", "(ms,", "3", "proc.)", "12.50"] in lines


def test_what_was_found_cached_is_said() -> None:
    """The same seed twice against one mesh measures its cache: that must be seen."""
    records = [record(0, (1.0, 1), cached_tokens=8), record(1, (1.0, 1), cached_tokens=4), record(2, failure="lost")]
    assert any(line.split() == ["Input", "tokens", "found", "cached", "12"] for line in _table(records))
    assert not any("cached" in line for line in _table([record(0, (1.0, 1))]))
    said = json.loads(to_json(summarize(records), records, LOAD, 0.0))
    assert (said["summary"]["cached_tokens"], said["requests"][1]["cached_tokens"]) == (12, 4)


def _table(records: list[RequestRecord]) -> list[str]:
    return table(summarize(records), 0.0, 1).splitlines()


def test_the_table_says_why_requests_failed() -> None:
    records = [record(i, failure=f"reason {i // 2}") for i in range(2 * MAX_REASONS + 6)]
    lines = table(summarize(records), 0.0, 1).splitlines()
    assert f"{2 * MAX_REASONS + 6} requests failed:" in lines
    assert "       2 x reason 0" in lines
    assert lines[-1] == "       6 x 3 other reasons"
    assert failure_lines(summarize([record(0, (1.0, 1))])) == []


def test_a_client_that_lags_is_told_of() -> None:
    assert lag_warning(LAG_WARNING_S, 1) is None
    assert "raise --processes (it was 2)" in (lag_warning(0.0501, 2) or "")


def test_the_json_has_all_figures_and_every_request() -> None:
    records = [record(0, (0.5, 1), (1.0, 1)), record(1, failure="lost")]
    said = json.loads(to_json(summarize(records), records, LOAD, 0.002))
    assert said["settings"]["workload"]["request_rate"] == "inf"
    assert said["settings"]["max_concurrency"] == 7
    assert said["client"] == {"max_loop_lag_s": 0.002, "processes": 3}
    assert said["summary"]["output_tokens_per_s"] == 2.0
    assert said["summary"]["failures"] == [["lost", 1]]
    assert said["summary"]["itl"]["p99"] == 0.5
    assert said["requests"][0]["message_s"] == [0.5, 1.0]
    assert said["requests"][0]["ttft_s"] == 0.5
    assert said["requests"][1]["failure"] == "lost"
    assert json.loads(to_json(summarize([]), [], LOAD, 0.0))["summary"]["ttft"]["mean"] is None
