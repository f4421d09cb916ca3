"""The benchmark scripts still work: a run too small to measure anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.mesh import ROOT


def run(*command: str) -> list[str]:
    """The lines that it has printed. Fails unless it ends well."""
    environ = {**os.environ, "PYTHONPATH": ".ns:."}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_router_benchmark_ends_with_its_table() -> None:
    header, *rows = run("tests/bench/router.py", "--streams", "20", "--tokens", "20", "--paces", "0")
    assert "tokens/s" in header
    assert len(rows) == 2


@pytest.mark.slow
def test_a_small_stress_on_a_pool_for_a_quarter_of_it_finishes() -> None:
    *_, finished, _, _ = run("tests/bench/pressure.py", "--parts", "stress", "--prompts", "12")
    assert finished.startswith("12 of 12 finished")


@pytest.mark.slow
def test_a_part_of_long_answers_on_a_small_pool_is_told_of() -> None:
    limits = ("--prompts", "8", "--conservativeness", "0.1", "--no-fitting", "--seconds", "2")
    *_, row = run("tests/bench/retraction.py", *limits)
    name, conservativeness, pages, finished, failed, rate = row.split()
    assert (name, conservativeness, failed) == ("conservativeness", "0.1", "0")
    assert int(pages) == 25
    assert 0 <= int(finished) <= 8
    assert int(rate) > 0


@pytest.mark.full
def test_a_short_soak_holds_nothing_at_the_end() -> None:
    *_, ends = run("tests/bench/soak.py", "--requests", "640")
    assert ends.startswith("{")
    assert "'refused': 20" in ends
    assert "'gone': 20" in ends
