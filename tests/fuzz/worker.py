"""`python -m tests.fuzz.worker FOLDER SEED JOBS`: runs inputs, one after the other, and may die of one.

JOBS is a JSON array of [target, first, end]. FOLDER/progress says before each input how far it is; findings go to
FOLDER/findings.jsonl as they come.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.fuzz.judge import Finding, Outcome, judge, limit_memory
from tests.fuzz.targets import TARGETS

COUNTS: Final = struct.Struct("<4q")  # of a job: inputs begun, accepted, typed, failed
FINDINGS: Final = "findings.jsonl"
PROGRESS: Final = "progress"


class Progress:
    """What a parent can read after this process has died."""

    def __init__(self, folder: Path, num_jobs: int) -> None:
        path = folder / PROGRESS
        if not path.exists():
            path.write_bytes(bytes(COUNTS.size * num_jobs))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def read(self, job: int) -> list[int]:
        return list(COUNTS.unpack_from(self._map, job * COUNTS.size))

    def write(self, job: int, counts: Sequence[int]) -> None:
        COUNTS.pack_into(self._map, job * COUNTS.size, *counts)


def main(folder: Path, seed: int, jobs: list[tuple[str, int, int]]) -> None:
    faulthandler.enable()
    progress = Progress(folder, len(jobs))
    targets = {target.name: target for target in TARGETS}
    with (folder / FINDINGS).open("ab", buffering=0) as findings:
        for number, (name, first, end) in enumerate(jobs):
            at, accepted, typed, failed = progress.read(number)
            if first + at >= end:
                continue
            scratch = folder / name
            scratch.mkdir(exist_ok=True)
            attempt = targets[name].open(scratch)
            limit_memory()
            for index in range(first + at, end):
                progress.write(number, (index - first + 1, accepted, typed, failed))
                outcome, finding = judge(targets[name], attempt, seed, index)
                accepted += outcome is Outcome.ACCEPTED
                typed += outcome is Outcome.TYPED
                failed += outcome is Outcome.FAILED
                if finding is not None:
                    findings.write(msgspec.json.encode(finding) + b"\n")
            progress.write(number, (end - first, accepted, typed, failed))


def read_findings(folder: Path) -> list[Finding]:
    path = folder / FINDINGS
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Finding) for line in lines]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
