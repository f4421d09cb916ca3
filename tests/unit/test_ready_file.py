"""The ready file and the run dir where they cannot be written: said in a line, and no mesh that serves ends of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.plan import ProcessSpec
from stagemesh.shared.runtime.ready import AGAIN_S, ReadyFile
from stagemesh.shared.runtime.rundir import private_run_dir, write_atomically
from tests.support.faked import kill, mesh_of
from tests.support.mesh import terminate


def children(router_pid: int) -> list[Child]:
    router = ProcessSpec("router", "router", None, None, "127.0.0.1:12345")
    broker = ProcessSpec("broker", "broker", None, None, "unix:/broker.sock")
    return [Child(router, router_pid, output_fd=-1), Child(broker, pid=1, output_fd=-1)]


def config(tmp_path: Path) -> Config:
    return build_config(local_document(LocalLayout(port=0), tmp_path), source="the test", environ={}, options={})


def blocked(path: Path, pid: int) -> Path:
    """What stops every write of that process, even root's: a folder where its draft goes. Without it, writes go on."""
    (draft := path.with_name(f".{path.name}.{pid}")).mkdir()
    return draft


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    draft = blocked(path, os.getpid())
    with pytest.raises(Retryable, match=rf"^{re.escape(str(path))} cannot be written: Is a directory$"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    draft.rmdir()
    write_atomically(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777, [*tmp_path.iterdir()]) == ("new", 0o600, [path])


def test_a_full_disk_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.with_name(f".file.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(Retryable, match="No space left on device"):
        write_atomically(path, "new")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("wanted", [None, "run"])
def test_a_run_dir_is_held_by_one_whoever_has_chosen_its_name(tmp_path: Path, wanted: str | None) -> None:
    if wanted is not None:
        (tmp_path / wanted).mkdir()
    with private_run_dir(None if wanted is None else tmp_path / wanted) as path:
        if (child := os.fork()) == 0:  # record locks tell processes apart
            try:
                with private_run_dir(path):
                    os._exit(1)
            except Rejected as error:
                os._exit(0 if "in use by another stagemesh" in str(error) else 2)
        assert os.waitpid(child, 0)[1] == 0


def test_a_run_dir_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(Rejected, match="run_dir: cannot make a temporary one: No such file"), private_run_dir(None):
        pass
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with pytest.raises(Rejected, match=r"run_dir: cannot use .*: Is a directory"), private_run_dir(tmp_path / "run"):
        pass


def test_what_is_not_ours_to_replace_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(Rejected, match="no ready file of this version"):
        ReadyFile(path, pytest.fail)
    assert path.stat().st_size == 104
    with pytest.raises(Rejected, match="is no plain file"):
        ReadyFile(tmp_path, pytest.fail)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(Rejected, match="is no plain file"):
        ReadyFile(fifo, pytest.fail)


def test_where_it_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    blocked(tmp_path / "ready.json", os.getpid())
    with pytest.raises(Rejected, match=r"ready_file: .*ready.json cannot be written: Is a directory"):
        ReadyFile(tmp_path / "ready.json", pytest.fail)


def test_an_empty_one_is_there_to_be_written_over(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.touch()
    file = ReadyFile(path, pytest.fail)
    assert not path.exists()
    file.write(config(tmp_path), children(1))
    assert json.loads(path.read_text())["router"] == "127.0.0.1:12345"
    file.remove()
    assert not path.exists()


def test_a_new_record_is_tried_again_until_it_is_written_and_said_once(tmp_path: Path) -> None:
    path, said = tmp_path / "ready.json", list[str]()
    file = ReadyFile(path, said.append)
    file.write(config(tmp_path), children(1))
    draft = blocked(path, os.getpid())
    file.renew(config(tmp_path), children(2), now_s=10.0)
    file.look(10.0 + AGAIN_S)
    assert [line.partition(";")[0] for line in said] == [f"ready_file: {path} cannot be written: Is a directory"]
    assert json.loads(path.read_text())["processes"][0]["pid"] == 1
    draft.rmdir()
    file.look(10.0 + 1.5 * AGAIN_S)
    assert json.loads(path.read_text())["processes"][0]["pid"] == 1, "it is not time yet"
    file.look(10.0 + 2 * AGAIN_S)
    assert (json.loads(path.read_text())["processes"][0]["pid"], file.deadline_s) == (2, None)


def test_a_mesh_that_serves_goes_on_where_the_file_cannot_be_renewed(tmp_path: Path) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.record()
        draft = blocked(mesh.ready_file, mesh.process.pid)
        kill(mesh, "decode-0/1")
        mesh.read_until("ready.json cannot be written: Is a directory; until it can be, it has addresses and pids")
        mesh.read_until("decode-0 is back, start 2")
        draft.rmdir()
        terminate(mesh)
        assert mesh.wait() == 0
    assert "Traceback" not in mesh.output


def test_a_mesh_whose_file_cannot_be_written_is_drained_and_says_why(tmp_path: Path) -> None:
    with mesh_of(tmp_path, behaviour="decode-0/0=wait") as mesh:
        mesh.read_until("router is ready")
        blocked(mesh.ready_file, mesh.process.pid)
        assert mesh.wait() == 1
    assert f"error: ready_file: {mesh.ready_file} cannot be written: Is a directory" in mesh.output
    assert "Traceback" not in mesh.output
    assert "decode-0/0 told to stop" in (tmp_path / "run.journal").read_text()


def test_a_run_dir_that_cannot_be_written_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "run" / "config.toml").mkdir(parents=True)
    with mesh_of(tmp_path) as mesh:
        assert mesh.wait() == 1
    assert "config.toml cannot be written: Is a directory" in mesh.output
