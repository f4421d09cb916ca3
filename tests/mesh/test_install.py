"""`pip install .` in a new environment, without extras: the broker and the NATS server run, and nothing heavy came."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mesh import ROOT
from tests.support.unit_mesh import free_port, unit_host
from tests.unit.test_packaging import NOT_SOURCE

pytestmark = pytest.mark.full
BROKER, NATS = "stagemesh-broker.service", "stagemesh-nats.service"
CONFIG = """
[mesh]
run_dir = "{root}/run/stagemesh"
[nats]
url = "nats://127.0.0.1:{port}"
[broker]
listen = "unix:{root}/run/stagemesh/broker.sock"
[model]
path = "smollm2"
[[instance]]
name = "prefill-0"
role = "prefill"
pp_size = 1
stages = ["unix:{root}/run/stagemesh/p.sock"]
[[instance]]
name = "decode-0"
role = "decode"
pp_size = 1
stages = ["unix:{root}/run/stagemesh/d.sock"]
"""


def call(*command: str | Path) -> str:
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("install")
    shutil.copytree(ROOT, work / "tree", symlinks=True, ignore=NOT_SOURCE)
    call(sys.executable, "-m", "venv", work / "venv")
    call(work / "venv/bin/python", "-m", "pip", "install", "--quiet", work / "tree")
    return work / "venv"


def test_nothing_heavy_is_installed_and_the_command_works(environment: Path) -> None:
    installed = call(environment / "bin/python", "-m", "pip", "list").lower()
    assert "grpcio" in installed
    assert not [name for name in ("torch", "mooncake", "nvidia", "nixl") if f"\n{name}" in installed]
    assert "prefill" in call(environment / "bin/stagemesh", "--help")
    call(environment / "bin/python", "-c", "import stagemesh.services.router.service")


def test_broker_and_nats_run_from_it(environment: Path, tmp_path: Path) -> None:
    root = tmp_path / "r"
    (root / "run/stagemesh").mkdir(parents=True)
    with unit_host(root, CONFIG.format(root=root, port=free_port())) as host:
        host.program.unlink()
        host.program.symlink_to(environment / "bin/stagemesh")
        for name in (NATS, BROKER):
            host.start(name)
        host.until("READY", NATS, BROKER)
        assert host.running[BROKER].process.poll() is None
        host.terminate(NATS, BROKER)
        host.until("STOPPING", NATS, BROKER)
        host.wait(NATS, BROKER)
        assert host.running[NATS].process.returncode != -signal.SIGKILL
