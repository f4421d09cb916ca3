"""A supervisor in a process of its own, watched through its stderr; nothing of it is left at the end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]


class Mesh:
    """A supervisor that was started with `run_dir` and `ready_file` below a test's own directory."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, ready_file: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.ready_file = ready_file
        self.output = ""

    def read_until(self, text: str, times: int = 1) -> None:
        """Reads stderr up to `text`, for the `times`th time. Fails if it ends before."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + LIMIT_S
        while self.output.count(text) < times:
            readable, _, _ = select.select([self.process.stderr], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"no {text!r} within {LIMIT_S} s in:\n{self.output}"
            data = os.read(self.process.stderr.fileno(), 1 << 16)
            assert data, f"no {text!r} in:\n{self.output}"
            self.output += data.decode()

    def record(self) -> dict[str, Any]:
        """The ready file's content, once all are ready."""
        self.read_until("stagemesh serves")
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    def pids(self) -> dict[str, int]:
        return {process["name"]: process["pid"] for process in self.record()["processes"]}

    def wait(self) -> int:
        """Its exit code; `output` is whole then."""
        _, rest = self.process.communicate(timeout=LIMIT_S)
        self.output += rest.decode()
        return self.process.returncode


@contextmanager
def started(tmp_path: Path, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Mesh]:
    """`command` is what follows `python -m`; `{run_dir}` and `{ready_file}` in it are filled in."""
    run_dir, ready_file = tmp_path / "run", tmp_path / "ready.json"
    arguments = [part.format(run_dir=run_dir, ready_file=ready_file) for part in command]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("STAGEMESH_")}
    marks = {key: value for key, value in os.environ.items() if key == "STAGEMESH_TEST_MARK"}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**inherited, **marks, "PYTHONPATH": f"{ROOT / '.ns'}:{ROOT}", **(environ or {})},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    mesh = Mesh(process, run_dir, ready_file)
    try:
        yield mesh
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


def wait_gone(pids: Sequence[int]) -> None:
    """Returns when none of the processes runs any more. Fails if that takes too long."""
    deadline = time.monotonic() + LIMIT_S
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(fd)
        assert ended, f"process {pid} still runs"


def terminate(mesh: Mesh, number: signal.Signals = signal.SIGTERM) -> None:
    mesh.process.send_signal(number)
