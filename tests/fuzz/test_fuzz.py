"""Wrong inputs of every kind: none crashes, hangs or takes what it may not; each is taken, or refused with a true
error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz.judge import Outcome, Target, judge
from tests.fuzz.run import Report, fuzz
from tests.fuzz.targets import TARGETS

QUICK = [target for target in TARGETS if target.name != "template-render"]  # which are a process each


def check(report: Report) -> None:
    print(f"\n{report.table()}")
    assert not report.findings, report.kinds()
    assert report.crashes == 0
    assert all(tally.typed and tally.typed + tally.accepted == tally.inputs for tally in report.tallies.values())


@pytest.mark.slow
def test_a_sample_of_wrong_inputs() -> None:
    report = fuzz(2_500, seed=1, targets=QUICK)
    assert report.inputs >= 2_450
    check(report)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_many_wrong_inputs(seed: int) -> None:
    report = fuzz(50_000, seed=100 + seed)
    assert report.inputs >= 49_900
    check(report)


def spin() -> None:
    while True:
        pass


def fail() -> None:
    raise KeyError("x")


@pytest.mark.parametrize(("work", "error"), [(spin, "TooSlow"), (fail, "KeyError")])
def test_what_is_no_typed_error_is_a_finding(
    work: Callable[[], None], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzz.judge.CPU_LIMIT_S", 0.05)
    outcome, finding = judge(Target("t", 1, lambda folder: lambda rng: None), lambda rng: work(), 0, 7)
    assert outcome is Outcome.FAILED
    assert finding is not None
    assert (finding.target, finding.index) == ("t", 7)
    assert finding.what.startswith(error)
