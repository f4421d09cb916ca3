"""`stagemesh up` and children that are stopped, stand still, or never get ready, over fake services and a real NATS
server."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from stagemesh.shared.runtime.options import Limits
from tests.support.fake_mesh import LIMITS
from tests.support.fake_services import LONG_S
from tests.support.faked import kill, mesh_of
from tests.support.mesh import LIMIT_S, terminate, wait_gone

ACTED_WITHIN_S = 3.0


def limits(**changed: float) -> dict[str, str]:
    """An environment in which those of the supervisor are shorter, or longer."""
    return {LIMITS: json.dumps(changed)}


@pytest.mark.parametrize("name", ["router", "broker", "nats", "prefill-0/1"])
def test_who_is_stopped_is_killed_in_time_and_started_again(tmp_path: Path, name: str) -> None:
    with mesh_of(tmp_path) as mesh:
        before = mesh.pids()
        os.kill(before[name], signal.SIGSTOP)
        stopped_s = time.monotonic()
        mesh.read_until(f"error: {name} was killed by SIGKILL")
        assert Limits().stopped_s <= time.monotonic() - stopped_s < ACTED_WITHIN_S
        mesh.read_until(f"{name.partition('/')[0]} is back, start 2")
        assert mesh.output.count(f"error: {name} is stopped") == 1
        terminate(mesh)
        assert mesh.wait() == 0
        wait_gone([*before.values()])


def test_who_is_stopped_while_all_ends_is_not_waited_for(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        os.kill(mesh.pids()["broker"], signal.SIGSTOP)
        stopped_s = time.monotonic()
        terminate(mesh)
        assert mesh.wait() == 1
        assert time.monotonic() - stopped_s < ACTED_WITHIN_S
    assert "error: broker was killed by SIGKILL while stopping" in mesh.output


@pytest.mark.parametrize(
    ("name", "number"),
    [("router", signal.SIGUSR1), ("broker", signal.SIGUSR2), ("nats", signal.SIGSTOP)],  # hangs, spins, greets nobody
)
def test_who_stands_still_is_killed_and_started_again(tmp_path: Path, name: str, number: signal.Signals) -> None:
    with mesh_of(tmp_path, environ=limits(watchdog_s=2.0, stopped_s=LIMIT_S)) as mesh:
        before = mesh.pids()
        os.kill(before[name], number)
        mesh.read_until(f"{name} is back, start 2")
        assert f"error: {name} has made no progress for 2 s" in mesh.output
        assert f"error: {name} was killed by SIGKILL" in mesh.output
        assert mesh.output.count("has made no progress") == 1
        terminate(mesh)
        assert mesh.wait() == 0
        wait_gone([*before.values()])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("hang", r"is not ready \(\w*\) and has done nothing for 1 s"),  # on a busy host not even its first word came
        ("stop", "is stopped"),
    ],
)
def test_who_hangs_before_it_is_ready_ends_the_start(tmp_path: Path, how: str, says: str) -> None:
    with mesh_of(tmp_path, behaviour=f"decode-0/0={how}", environ=limits(quiet_s=1.0, stopped_s=0.5)) as mesh:
        assert mesh.wait() == 1
    assert re.search(f"error: decode-0/0 {says}", mesh.output), mesh.output
    assert "error: decode-0/0 was killed by SIGKILL\n" in mesh.output


@pytest.mark.parametrize(
    ("how", "says"),
    [("hang again", "done nothing for 1 s"), ("spin again", "said nothing for 2 s")],
)
def test_who_hangs_when_it_is_started_again_is_started_once_more(tmp_path: Path, how: str, says: str) -> None:
    with mesh_of(tmp_path, behaviour=f"broker={how}", environ=limits(quiet_s=1.0, start_s=2.0)) as mesh:
        mesh.record()
        kill(mesh, "broker")
        mesh.read_until("broker is back, start 3")
        assert re.search(rf"error: broker is not ready \(\w*\) and has {says}", mesh.output), mesh.output
        terminate(mesh)
        assert mesh.wait() == 0


@pytest.mark.parametrize("how", ["wait", "work"])
def test_a_long_start_is_no_hang(tmp_path: Path, how: str) -> None:
    assert LONG_S > 2.0
    with mesh_of(tmp_path, behaviour=f"router={how}", environ=limits(quiet_s=1.0)) as mesh:
        mesh.record()
        terminate(mesh)
        assert mesh.wait() == 0


def test_a_stopped_member_of_an_instance_that_falls_is_not_waited_for(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        os.kill(mesh.pids()["decode-0/0"], signal.SIGSTOP)
        kill(mesh, "decode-0/1")
        mesh.read_until("decode-0 is back, start 2")
        assert "error: decode-0/0 is stopped" in mesh.output
        terminate(mesh)
        assert mesh.wait() == 0
