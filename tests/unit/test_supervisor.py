"""`stagemesh up` over fake services and a real NATS server: in order, on time, and nothing is ever left."""

from __future__ import annotations

import re
import signal
import tomllib
from pathlib import Path

import pytest

from stagemesh.shared.config import load_config
from tests.support.fake_services import OPENAI_PORT
from tests.support.faked import kill, mesh_of
from tests.support.mesh import terminate, wait_gone


def journal(tmp_path: Path) -> list[str]:
    path = tmp_path / "run.journal"
    return path.read_text().splitlines() if path.exists() else []


def test_it_starts_all_says_where_they_are_and_stops_them_in_order(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        record, pids = mesh.record(), mesh.pids()
        assert record["router"] == "127.0.0.1:12345"  # what it notified, not the port 0 of the config
        assert record["broker"] == f"unix:{mesh.run_dir}/broker.sock"
        assert record["pid"] == mesh.process.pid
        assert (mesh.ready_file.stat().st_mode & 0o777, mesh.run_dir.stat().st_mode & 0o777) == (0o600, 0o700)
        assert set(pids) == {"nats", "broker", "router", "prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1"}
        config = load_config(mesh.run_dir / "config.toml", {})
        assert config.nats.url == record["nats"] != ""
        terminate(mesh)
        assert mesh.wait() == 0
        wait_gone([*pids.values()])
    told = [line.split()[0] for line in journal(tmp_path) if line.endswith("told to stop")]
    assert (told[0], set(told[1:5]), told[5:]) == (
        "router",
        {"prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1"},
        ["broker"],
    )
    assert journal(tmp_path)[1] == "router stopped"  # nobody else was told before
    assert "[decode-0/1] decode-0/1 was started" in mesh.output
    assert "stagemesh: decode-0/1 is ready" in mesh.output
    assert not mesh.ready_file.exists()


def test_what_stands_before_the_router_starts_after_it_and_stops_before_it(tmp_path: Path) -> None:
    with mesh_of(tmp_path, environ={"STAGEMESH_OPENAI__PORT": "0"}) as mesh:
        record = mesh.record()
        assert record["openai"] == f"127.0.0.1:{OPENAI_PORT}"
        assert (tmp_path / "run.openai").read_text() == f"{OPENAI_PORT} in front of 127.0.0.1:12345"
        (tmp_path / "run.openai").unlink()
        kill(mesh, "openai")
        mesh.read_until("openai is back, start 2")
        assert (tmp_path / "run.openai").read_text() == f"{OPENAI_PORT} in front of 127.0.0.1:12345"
        terminate(mesh)
        assert mesh.wait() == 0
    assert f"OpenAI clients: http://127.0.0.1:{OPENAI_PORT}/v1, model smollm2" in mesh.output
    told = [line.split()[0] for line in journal(tmp_path) if line.endswith("told to stop")]
    assert told[:2] == ["openai", "router"]


def test_interrupt_drains_too(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        terminate(mesh, signal.SIGINT)
        assert mesh.wait() == 0


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        pids = mesh.pids()
        terminate(mesh, signal.SIGKILL)
        assert mesh.wait() == -signal.SIGKILL
        wait_gone([*pids.values()])


def test_an_instance_is_started_again_as_one_and_nobody_else_is(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        before = mesh.pids()
        kill(mesh, "decode-0/1")
        mesh.read_until("decode-0 is back, start 2")
        after = mesh.pids()
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"decode-0/0", "decode-0/1"}
        assert "error: decode-0/1 was killed by SIGKILL" in mesh.output
        terminate(mesh)
        assert mesh.wait() == 0
        wait_gone([*before.values(), *after.values()])


def test_an_instance_is_reported_once_the_last_of_its_processes_is_reaped(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        kill(mesh, "router")
        kill(mesh, "decode-0/1")
        kill(mesh, "decode-0/0")
        mesh.read_until("error: reaped: decode-0 of epoch 3")
        assert mesh.output.count("the report that decode-0 is reaped exited with status 2") == 1
        mesh.read_until("decode-0 is back, start 2")
        terminate(mesh)
        assert mesh.wait() == 0
    assert mesh.output.count("the report that") == 1


def test_router_broker_and_bus_come_back_where_they_were(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        before = mesh.record()
        for name in ("nats", "broker", "router"):
            kill(mesh, name)
            mesh.read_until(f"{name} is back, start 2")
        after = mesh.record()
        for address in ("nats", "broker", "router"):
            assert after[address] == before[address]
        addresses = {p["name"]: p["address"] for p in before["processes"]}
        assert {p["name"]: p["address"] for p in after["processes"]} == addresses
        terminate(mesh)
        assert mesh.wait() == 0


def test_what_dies_too_often_takes_the_mesh_down(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        for start in range(2, 6):
            kill(mesh, "router")
            mesh.read_until(f"router is back, start {start}")
        kill(mesh, "router")
        assert mesh.wait() == 1
    assert "error: router was killed by SIGKILL: 5 falls within 60 s are too many" in mesh.output
    assert "[router] router was started" in mesh.output.partition("the last lines of router:")[2]


def test_a_stop_while_something_is_down_is_a_stop(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        kill(mesh, "decode-0/1")
        mesh.read_until("decode-0/1 was killed by SIGKILL")
        terminate(mesh)
        assert mesh.wait() == 0
    assert "is back" not in mesh.output


@pytest.mark.parametrize(
    ("behaviour", "status", "says"),
    [
        ("prefill-0/1=crash", 1, "RuntimeError: no such luck"),
        ("prefill-0/1=refuse", 2, "error: memory: needs 2 GiB, has 1 GiB"),
    ],
)
def test_a_process_that_cannot_start_is_named_with_the_reason(
    tmp_path: Path, behaviour: str, status: int, says: str
) -> None:
    with mesh_of(tmp_path, behaviour=behaviour) as mesh:
        assert mesh.wait() == 1
    assert f"error: prefill-0/1 exited with status {status}" in mesh.output
    assert f"[prefill-0/1] {says}" in mesh.output.partition("the last lines of prefill-0/1:")[2]
    assert "serves" not in mesh.output
    assert not mesh.ready_file.exists()


def test_who_is_not_ready_in_time_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    with mesh_of(tmp_path, timeout_s=6.0, behaviour="decode-0/0=hang") as mesh:
        assert mesh.wait() == 1
    assert "error: not ready within 6 s: decode-0/0 (loading)" in mesh.output


def test_a_stop_while_starting_is_a_stop(tmp_path: Path) -> None:
    with mesh_of(tmp_path, behaviour="decode-0/0=hang") as mesh:
        mesh.read_until("router is ready")
        terminate(mesh)
        assert mesh.wait() == 0
    assert not mesh.ready_file.exists()


def test_a_process_that_does_not_stop_is_killed_at_the_deadline(tmp_path: Path) -> None:
    environ = {"STAGEMESH_ENGINE__DRAIN_TIMEOUT_S": "0.1"}
    with mesh_of(tmp_path, behaviour="decode-0/0=stay", environ=environ) as mesh:
        pids = mesh.pids()
        terminate(mesh)
        assert mesh.wait() == 1  # what it had in flight was lost, which is no clean stop
        wait_gone([*pids.values()])
    assert "error: decode-0/0 was killed by SIGKILL while stopping" in mesh.output
    assert journal(tmp_path)[-1] == "broker stopped"


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    with mesh_of(tmp_path, behaviour="router=stay") as mesh:
        pids = mesh.pids()
        terminate(mesh, signal.SIGINT)
        mesh.read_until("draining")
        terminate(mesh, signal.SIGINT)
        assert mesh.wait() == 1
        wait_gone([*pids.values()])
    assert not any(line.startswith("broker") for line in journal(tmp_path))


def test_what_a_process_started_and_left_behind_is_killed(tmp_path: Path) -> None:
    with mesh_of(tmp_path, behaviour="decode-0/0=child") as mesh:
        mesh.record()
        mesh.read_until("left behind")
        mesh.read_until(".\n")
        terminate(mesh)
        assert mesh.wait() == 0
        [pid] = re.findall(r"left behind: ([0-9]+)", mesh.output)
        wait_gone([int(pid)])


def test_a_run_dir_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as first:
        first.record()
        with mesh_of(tmp_path) as second:
            assert second.wait() == 1
        assert f"{first.run_dir} is in use by another stagemesh" in second.output
        terminate(first)
        assert first.wait() == 0


def test_a_kept_run_dir_can_be_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        with mesh_of(tmp_path) as mesh:
            mesh.record()
            terminate(mesh)
            assert mesh.wait() == 0
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["mesh"]["run_dir"] == str(mesh.run_dir)
