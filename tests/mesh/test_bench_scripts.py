"""The benchmark scripts still work: a run too small to measure anything."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.mesh import ROOT


def test_the_router_benchmark_ends_with_its_table() -> None:
    command = [sys.executable, "tests/bench/router.py", "--streams", "20", "--tokens", "20", "--paces", "0"]
    environ = {**os.environ, "PYTHONPATH": ".ns"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert "tokens/s" in header
    assert len(rows) == 2
