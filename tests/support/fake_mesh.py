"""`python -m tests.support.fake_mesh RUN_DIR READY_FILE TIMEOUT_S`: a supervisor over fake services."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stagemesh.shared.config import build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.runtime.options import Limits, UpOptions
from stagemesh.shared.runtime.reporter import Reporter
from stagemesh.shared.runtime.rundir import private_run_dir
from stagemesh.shared.runtime.supervisor import supervise
from tests.support.fake_services import ENTRIES

LIMITS = "STAGEMESH_FAKE_LIMITS"
"""Limits, as JSON."""


def main(run_dir: str, ready_file: str, timeout_s: str) -> int:
    with private_run_dir(Path(run_dir)) as path:
        config = build_config(
            local_document(LocalLayout(port=0), path), source="the test", environ=os.environ, options={}
        )
        options = UpOptions(
            config,
            Path(ready_file),
            float(timeout_s),
            entries=ENTRIES,
            preload=("numpy", "no_such"),
            reaped="tests.support.fake_services:reaped",
            limits=Limits(**json.loads(os.environ.get(LIMITS, "{}"))),
        )
        code = supervise(options, Reporter(sys.stderr))
    if "grpc" in sys.modules or "asyncio" in sys.modules:
        print("the supervisor imported what must not be forked", file=sys.stderr)
        return 99
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
