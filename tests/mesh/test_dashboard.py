"""A real Prometheus scrapes a mesh under load: it takes the alerts, and every panel shows something."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, generate, token_request
from tests.support.mesh import ROOT
from tests.support.queries import ALERTS, FOLDER, alerts, panels
from tests.support.running import START_LIMIT_S, RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny
from tests.support.unit_mesh import free_port

pytestmark = pytest.mark.full
# as deploy/install.sh --full unpacks them
TOOLS = ROOT / ".venv" / "prometheus" / "usr" / "bin"


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{TOOLS}:{os.environ['PATH']}")
    assert found, f"no {name}: bash deploy/install.sh --full unpacks Debian's package prometheus"
    return found


def get(server: str, path: str) -> Any:
    with urllib.request.urlopen(f"{server}/api/v1/{path}", timeout=30) as response:
        return json.load(response)["data"]


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """Scrapes `targets` every second; its URL, once it answers."""
    job = {"job_name": "stagemesh", "honor_labels": True, "static_configs": [{"targets": targets}]}
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(ALERTS)]}
    (folder / "prometheus.yml").write_text(json.dumps({**config, "scrape_configs": [job]}))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [tool("prometheus"), *options, f"--web.listen-address={address}", "--log.level=warn"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                get(f"http://{address}", "status/runtimeinfo")
                break
            except OSError:
                assert process.poll() is None, process.communicate()[1]
        yield f"http://{address}"
    finally:
        process.terminate()
        process.communicate()


async def load(mesh: RunningMesh, seconds: float) -> None:
    """Requests in pairs, for so long."""
    async with Client(mesh.router, GENERATOR) as client:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            async with asyncio.TaskGroup() as group:
                for first in (5, 6):
                    request = token_request([first, *range(10, 60)], 40, ignore_eos=True)
                    group.create_task(generate(client, request))


def test_promtool_takes_the_alerts() -> None:
    done = subprocess.run(
        [tool("promtool"), "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_every_panel_shows_something(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_layers=4)
    with running_mesh(tmp_path, "--model", str(model), "--num-pages", "200") as mesh:
        targets = [process["metrics"] for process in mesh.record["processes"] if process["metrics"]]
        with prometheus(tmp_path, targets) as server:
            asyncio.run(load(mesh, 25.0))
            rules = [rule for group in get(server, "rules")["groups"] for rule in group["rules"]]
            script = [sys.executable, str(FOLDER / "page.py"), server, "30"]
            drawn = subprocess.run(script, capture_output=True, text=True, check=False)
        assert drawn.returncode == 0, drawn.stderr
        assert [rule["name"] for rule in rules] == [rule["alert"] for rule in alerts()]
        assert [
            (rule["name"], rule["state"]) for rule in rules if rule["health"] != "ok" or rule["state"] == "firing"
        ] == []
        (tmp_path / "page.svg").write_text(drawn.stdout)
        parts = drawn.stdout.split('<g class="panel"')[1:]
        assert len(parts) == len(panels())
        empty = [part.split("</text>")[0].rpartition(">")[2] for part in parts if 'class="empty"' in part]
        assert empty == []
