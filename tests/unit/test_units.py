"""The units of systemd: its own tools find nothing to say, they expose little, and their numbers have reasons."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from stagemesh.shared.config.sections import EngineSection
from stagemesh.shared.runtime.drain import CLOSE_GRACE_S
from stagemesh.shared.runtime.options import Limits
from tests.support.units import DEPLOY, SERVICES, UNITS, install, load_unit

MAX_EXPOSURE = 2.5
DROP_INS = tuple(str(path.relative_to(DEPLOY / "examples")) for path in sorted(DEPLOY.glob("examples/*/*.conf")))
TARGETS = ("basic", "sysinit", "network-online", "multi-user", "shutdown")


@pytest.fixture(scope="module", params=[(), DROP_INS], ids=["plain", "with every drop-in"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where nothing but our units is installed, and the targets that they name."""
    path = tmp_path_factory.mktemp("root")
    install(path, *request.param)
    program = path / "opt/stagemesh/bin/stagemesh"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    targets = path / "usr/lib/systemd/system"
    targets.mkdir(parents=True)
    for name in TARGETS:
        (targets / f"{name}.target").write_text("[Unit]\n")
    return path


def analyze(root: Path, *arguments: str) -> str:
    """All that it says. Fails if the tool does."""
    command = ["systemd-analyze", "--no-pager", f"--root={root}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", [*SERVICES, "stagemesh.target"])
def test_systemd_finds_nothing_to_say(root: Path, name: str) -> None:
    assert analyze(root, "verify", "--man=no", f"/{UNITS}/{name}") == ""


def test_what_systemd_would_say_is_noticed(root: Path) -> None:
    odd = root / UNITS / "odd.service"
    odd.write_text("[Service]\nExecStart=/opt/stagemesh/bin/stagemesh\nWatchdogSecs=3\n")
    said = analyze(root, "verify", "--man=no", f"/{UNITS}/{odd.name}")
    odd.unlink()
    assert "WatchdogSecs" in said


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_exposes_little(root: Path, name: str) -> None:
    named = name.replace("@.", "@decode-0:1.")
    said = analyze(root, "security", "--offline=true", f"--threshold={round(MAX_EXPOSURE * 10)}", named)
    match = re.search(r"Overall exposure level for (\S+): ([0-9.]+)", said)
    assert match, said
    print(f"{match[1]}: {match[2]}")
    assert float(match[2]) <= MAX_EXPOSURE


FILES = [*sorted(DEPLOY.rglob("*.service")), *sorted(DEPLOY.rglob("*.conf"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_number_has_its_reason_beside_it(path: Path) -> None:
    for above, line in pairwise(path.read_text().splitlines()):
        if re.fullmatch(r"\w+=(\d+\w*|infinity)", line):
            assert above.startswith("#") or re.fullmatch(r"Restart=\w+", above), f"{path.name}: {line}"


@pytest.mark.parametrize("name", SERVICES)
def test_a_stop_waits_longer_than_a_drain_of_the_default_and_its_end(root: Path, name: str) -> None:
    unit = load_unit(root, name)
    drains = name in SERVICES[2:]
    assert unit.seconds("TimeoutStopSec") > (EngineSection().drain_timeout_s if drains else 0) + CLOSE_GRACE_S
    assert unit.value("Type") == "notify"
    assert unit.seconds("WatchdogSec") >= Limits().watchdog_s, "it counts time without a core, which `up` does not"
    assert unit.value("WatchdogSignal") == "SIGKILL"
    assert ("LimitMEMLOCK" in unit.values) == ("@" in name)


def test_a_secret_is_handed_to_those_that_need_it_alone(tmp_path: Path) -> None:
    install(tmp_path, *DROP_INS)
    given = {
        name: [line.partition(":")[0] for line in load_unit(tmp_path, name).values.get("LoadCredential", [])]
        for name in SERVICES
    }
    assert list(given.values()) == [
        ["host.key"],
        ["host.key", "broker"],
        ["host.key", "keys", "router"],
        ["host.key", "stage"],
        ["host.key", "stage"],
        ["host.key"],
    ]
