"""Wrong inputs by the hundred thousand, to everything that takes input from outside, and a table of what came of it.

    python tests/fuzz/run.py --inputs 200000 [--seed 0] [--target NAME] [--jobs 2]
    python tests/fuzz/run.py --target NAME --index 4711      # one input again

An input is accepted, or refused with a typed error. Anything else is a finding: another exception, an invariant of
ours, a process that dies, more than a few seconds of CPU time or a gigabyte. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / ".ns"), str(ROOT)]

from tests.fuzz.judge import Finding, Target  # noqa: E402
from tests.fuzz.targets import TARGETS  # noqa: E402
from tests.fuzz.worker import Progress, read_findings  # noqa: E402

Job = tuple[str, int, int]
MAX_DEATHS = 50


@dataclass(slots=True)
class Tally:
    """Of one target."""

    inputs: int = 0
    typed: int = 0
    accepted: int = 0
    crashes: int = 0


@dataclass(slots=True)
class Report:
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(tally.inputs for tally in self.tallies.values())

    @property
    def crashes(self) -> int:
        return sum(tally.crashes for tally in self.tallies.values())

    def table(self) -> str:
        rows = [("target", "inputs", "typed errors", "accepted", "crashes")]
        rows += [(n, f"{t.inputs}", f"{t.typed}", f"{t.accepted}", f"{t.crashes}") for n, t in self.tallies.items()]
        total = self.tallies.values()
        rows.append(
            (
                "all",
                f"{self.inputs}",
                f"{sum(tally.typed for tally in total)}",
                f"{sum(tally.accepted for tally in total)}",
                f"{self.crashes}",
            )
        )
        return "\n".join(f"{a:<18}{b:>10}{c:>14}{d:>12}{e:>10}" for a, b, c, d, e in rows)

    def kinds(self) -> str:
        """Each kind of finding once, with an input that shows it."""
        counts = Counter((finding.target, finding.what) for finding in self.findings)
        first = {(finding.target, finding.what): finding for finding in reversed(self.findings)}
        return "\n".join(
            f"{count:>6} x {target} #{first[target, what].index}: {what}\n{first[target, what].details}"
            for (target, what), count in counts.most_common()
        )


def fuzz(num_inputs: int, seed: int, targets: Sequence[Target] = TARGETS, jobs: int = 1) -> Report:
    """Shares the inputs out among the targets, and the indices of each among `jobs` processes."""
    shares = sum(target.share for target in targets)
    wanted = {target.name: max(jobs, num_inputs * target.share // shares) for target in targets}
    report = Report({target.name: Tally() for target in targets})
    split = [[(n, c * at // jobs, c * (at + 1) // jobs) for n, c in wanted.items()] for at in range(jobs)]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        workers = [Worker(Path(folder) / str(at), seed, each) for at, each in enumerate(split)]
        while any(worker.running for worker in workers):
            for worker in workers:
                worker.wait()
        for worker in workers:
            worker.add_to(report)
    return report


class Worker:
    """A process that runs inputs; another one goes on where it has died."""

    def __init__(self, folder: Path, seed: int, jobs: list[Job]) -> None:
        folder.mkdir()
        self._folder, self._seed, self._jobs = folder, seed, jobs
        self._said = folder / "stderr"
        self._deaths: list[Finding] = []
        self._progress = Progress(folder, len(jobs))
        self._process: subprocess.Popen[bytes] | None = self._start()

    @property
    def running(self) -> bool:
        return self._process is not None

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [str(self._folder), str(self._seed), msgspec.json.encode(self._jobs).decode()]
        command = [sys.executable, "-m", "tests.fuzz.worker", *arguments]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / '.ns'}:{ROOT}"}
        with self._said.open("wb") as said:
            return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=said)

    def wait(self) -> None:
        """To the end of the process. If it died of an input, that is a finding, and the next one is started."""
        if self._process is None:
            return
        code, self._process = self._process.wait(), None
        if code:
            self._deaths.append(self._death(code, self._said.read_text(errors="replace")))
            if len(self._deaths) < MAX_DEATHS:
                self._process = self._start()

    def _death(self, code: int, said: str) -> Finding:
        for number, (name, first, end) in enumerate(self._jobs):
            at, accepted, typed, failed = self._progress.read(number)
            if first + at < end or at > accepted + typed + failed:
                if at == accepted + typed + failed:
                    break  # between two inputs: it cannot even start
                self._progress.write(number, (at, accepted, typed, failed + 1))
                return Finding(name, first + at - 1, f"the process died, exit code {code}", said[-4000:])
        raise SystemExit(f"a worker died with {code}:\n{said}")

    def add_to(self, report: Report) -> None:
        for number, (name, _, _) in enumerate(self._jobs):
            at, accepted, typed, failed = self._progress.read(number)
            tally = report.tallies[name]
            tally.inputs += at
            tally.accepted += accepted
            tally.typed += typed
            tally.crashes += failed
        report.findings += [*read_findings(self._folder), *self._deaths]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=[target.name for target in TARGETS])
    parser.add_argument("--index", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    chosen = [target for target in TARGETS if options.target in (None, target.name)]
    if options.index is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            worker = Worker(Path(folder) / "0", options.seed, [(chosen[0].name, options.index, options.index + 1)])
            report = Report({chosen[0].name: Tally()})
            worker.wait()
            worker.add_to(report)
    else:
        report = fuzz(options.inputs, options.seed, chosen, options.jobs)
    if report.findings:
        print(report.kinds())
    print(report.table())
    return int(report.crashes > 0)


if __name__ == "__main__":
    sys.exit(main())
