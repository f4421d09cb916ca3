"""The control socket of `stagemesh up`, restarts that are asked for, and whose ready file is live."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from pathlib import Path

import pytest

from stagemesh.shared.errors import PeerLost, Rejected, Retryable, Unreachable
from stagemesh.shared.runtime.control import (
    CONTROL_SOCKET,
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    REQUEST_WITHIN_S,
    ControlReply,
    ControlRequest,
    ControlSocket,
    GroupInfo,
    ask,
)
from stagemesh.shared.runtime.ready import process_start, read_ready
from stagemesh.shared.runtime.restarts import MAX_FALLS
from tests.support.faked import kill, mesh_of
from tests.support.mesh import LIMIT_S, Mesh, terminate


def restart(mesh: Mesh, group: str) -> ControlReply:
    return ask(mesh.run_dir / CONTROL_SOCKET, ControlRequest("restart", group), LIMIT_S)


def test_a_group_is_drained_and_started_again_when_asked_for_which_is_no_fall(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        before, path = mesh.pids(), mesh.run_dir / CONTROL_SOCKET
        assert path.stat().st_mode & 0o777 == 0o600
        known = ask(path, ControlRequest("groups"), LIMIT_S)
        assert known.router == "127.0.0.1:12345"
        assert set(known.groups) == {
            *(GroupInfo(name, name) for name in ("nats", "broker", "router")),
            *(GroupInfo(f"{role}-0", role) for role in ("prefill", "decode")),
        }
        assert restart(mesh, "decode-0") == ControlReply(start=2, epoch=3)
        changed = {name for name, pid in mesh.pids().items() if before[name] != pid}
        assert changed == {"decode-0/0", "decode-0/1"}
        for start in range(2, MAX_FALLS + 3):
            assert restart(mesh, "router").start == start
        assert restart(mesh, "nats").start == restart(mesh, "broker").start == 2
        terminate(mesh)
        assert mesh.wait() == 0
    told = (tmp_path / "run.journal").read_text().splitlines()
    assert {"decode-0/0 stopped", "decode-0/1 stopped"} <= set(told[:4])
    assert "is killed" not in mesh.output
    assert "router exited with status 0\n" in mesh.output
    assert not path.exists()


def test_who_does_not_drain_in_time_is_killed_and_said(tmp_path: Path) -> None:
    environ = {"STAGEMESH_ENGINE__DRAIN_TIMEOUT_S": "0.1"}
    with mesh_of(tmp_path, behaviour="decode-0/0=stay", environ=environ) as mesh:
        mesh.record()
        assert restart(mesh, "decode-0").troubles == ("decode-0/0 was killed by SIGKILL",)


@pytest.mark.parametrize("behaviour", ["", "prefill-0/0=cut off"])
def test_a_group_that_ends_by_itself_to_be_started_again_has_not_fallen(tmp_path: Path, behaviour: str) -> None:
    with mesh_of(tmp_path, behaviour=behaviour) as mesh:
        before = mesh.pids()
        for start in range(2, MAX_FALLS + 3):
            for name in ("prefill-0/0", "prefill-0/1"):
                kill(mesh, name, signal.SIGHUP)
            mesh.read_until(f"prefill-0 is back, start {start}")
        changed = {name for name, pid in mesh.pids().items() if before[name] != pid}
        assert changed == {"prefill-0/0", "prefill-0/1"}
        kill(mesh, "prefill-0/1")
        mesh.read_until(f"prefill-0 is back, start {MAX_FALLS + 3}")
        terminate(mesh)
        assert mesh.wait() == (1 if behaviour else 0)
    assert mesh.output.count("stagemesh: prefill-0 ends to be started again: for a reason\n") == MAX_FALLS + 1
    assert mesh.output.count("stagemesh: prefill-0/1 exited with status 0\n") == MAX_FALLS + 1
    assert mesh.output.count("stagemesh: error: prefill-0/1") == 1, "what is not announced is a fall"
    cut_off = mesh.output.count("stagemesh: error: prefill-0/0 exited with status 1")
    assert cut_off >= (MAX_FALLS + 1 if behaviour else 0)


def test_what_cannot_be_restarted_is_refused_by_name(tmp_path: Path) -> None:
    with mesh_of(tmp_path, behaviour="prefill-0/0=hang") as mesh:
        mesh.read_until("router is ready")
        with pytest.raises(Retryable, match="the mesh is starting"):
            restart(mesh, "router")
    with pytest.raises(Unreachable, match="no `stagemesh up` listens at"):
        restart(mesh, "router")
    with mesh_of(tmp_path, behaviour="router=stay") as mesh:
        mesh.record()
        with pytest.raises(Retryable, match="group: nothing is named 'prefill-7'; there are nats, broker,"):
            restart(mesh, "prefill-7")
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(mesh.run_dir / CONTROL_SOCKET))
            first.sendall(b'{"command":"restart","group":"router"}\n')
            with pytest.raises(Retryable, match="router is being started again already"):
                restart(mesh, "router")
            terminate(mesh, signal.SIGINT)
            terminate(mesh, signal.SIGHUP)
            assert first.recv(100) == b"", "the mesh ends instead"
        assert mesh.wait() == 1


def served(control: ControlSocket, selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(LIMIT_S):
        key.data()


@pytest.mark.parametrize(
    "data",
    [
        b"restart router\n",
        b'{"command":"stop","group":""}\n',
        b'{"command":"restart","group":7}\n',
        b'{"command":"restart","group":"router","now":true}\n',
        b'{"command":"restart","group":"' + b"r" * 81 + b'"}\n',
        b"[" * 4000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_request_is_answered_so(tmp_path: Path, data: bytes) -> None:
    with selectors.PollSelector() as selector:
        control = ControlSocket(tmp_path / "c", selector)
        taken: list[ControlRequest] = []
        control.on_request = lambda _, request: taken.append(request)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(control.path))
            client.sendall(data)
            served(control, selector)
            served(control, selector)
            assert json.loads(client.recv(1 << 16))["error"].startswith("request: ")
        assert not taken
        control.close()


def test_clients_are_few_short_and_quick(tmp_path: Path) -> None:
    with selectors.PollSelector() as selector:
        control = ControlSocket(tmp_path / "c", selector)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CONNECTIONS + 1)]
        for client in clients:
            client.settimeout(LIMIT_S)
            client.connect(str(control.path))
            served(control, selector)
        assert clients[-1].recv(1) == b"", "one too many"
        clients[0].sendall(b" " * (MAX_REQUEST_BYTES + 1))
        while len(control.fds) > MAX_CONNECTIONS:
            served(control, selector)
        assert clients[0].recv(1) == b""
        control.look(time.monotonic())
        assert len(control.fds) == MAX_CONNECTIONS
        control.look(time.monotonic() + REQUEST_WITHIN_S)
        assert [client.recv(1) for client in clients[1:-1]] == [b""] * (MAX_CONNECTIONS - 1)
        assert control.deadline_s is None
        control.close()
        for client in clients:
            client.close()


def test_a_mesh_that_ends_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(LIMIT_S)
        pid = os.fork()
        if pid == 0:
            stream, _ = listener.accept()
            stream.recv(100)
            os._exit(0)
        with pytest.raises(PeerLost, match="closed without an answer"):
            ask(path, ControlRequest("groups"), LIMIT_S)
        os.waitpid(pid, 0)


def test_the_ready_file_of_a_killed_mesh_is_not_taken_for_live(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        live = read_ready(mesh.ready_file)
        assert (live.pid, live.run_dir) == (mesh.process.pid, str(mesh.run_dir))
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "ready.json").symlink_to(mesh.ready_file)
        with mesh_of(tmp_path / "other") as second:
            assert second.wait() == 1
        assert f"is in use by another stagemesh (pid {live.pid})" in second.output
        terminate(mesh, signal.SIGKILL)
        mesh.wait()
    with pytest.raises(Rejected, match=f"was left by a stagemesh that is gone .pid {live.pid}"):
        read_ready(mesh.ready_file)
    with mesh_of(tmp_path, behaviour="decode-0/0=hang") as mesh:
        mesh.read_until("router is ready")
        assert not mesh.ready_file.exists(), "a client would take it for this one's"


def test_another_process_of_the_same_pid_is_another_process(tmp_path: Path) -> None:
    path, own = tmp_path / "ready.json", process_start(os.getpid())
    bus = {"nats": "nats://127.0.0.1:4222", "nats_credentials": "", "mesh": "local"}
    record = {"router": "r", **bus, "run_dir": "d", "pid": os.getpid(), "pid_started": own}
    path.write_text(json.dumps(record))
    assert read_ready(path).pid == os.getpid()
    path.write_text(json.dumps({**record, "pid_started": (own or 0) - 1}))
    with pytest.raises(Rejected, match="is gone"):
        read_ready(path)
    path.write_text("")
    with pytest.raises(Rejected, match="is no ready file"):
        read_ready(path)


def test_a_broker_that_is_started_again_hears_of_every_reaped_instance(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        for instance in ("decode-0", "prefill-0"):
            kill(mesh, f"{instance}/0")
            mesh.read_until(f"{instance} is back, start 2")
        kill(mesh, "broker")
        for instance in ("decode-0", "prefill-0"):
            mesh.read_until(f"error: reaped: {instance} of epoch 3", times=2)
        terminate(mesh)
        assert mesh.wait() == 0
    assert "is reaped exited with status 1" not in mesh.output
