"""Who a caller is: keys that are right are known, all others are refused alike, and no secret is ever said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.errors import Rejected, Unauthenticated
from stagemesh.shared.obs.log import Log
from stagemesh.shared.security.client_files import KEY_VARIABLE, ClientFiles
from stagemesh.shared.security.keys import KeyRing, make_key, parse_keys
from tests.support.mesh import ROOT

LOG = Log(logging.getLogger("stagemesh.test"))


def keys_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def test_a_key_is_known_by_its_name_and_its_line_does_not_tell_it(tmp_path: Path) -> None:
    (one, line), (other, other_line) = make_key("alice"), make_key("bob")
    assert one.partition(".")[2] not in line
    ring = KeyRing(keys_file(tmp_path, "# clients", "", line, f"{other_line} weight=2.5  # twice"), LOG)
    assert ring.authenticate(f"Bearer {one}").name == "alice"
    assert ring.authenticate(f"bearer  {other} ").weight == 2.5


def test_two_keys_of_one_name_are_both_right_and_the_weight_holds_for_both(tmp_path: Path) -> None:
    (old, old_line), (new, new_line) = make_key("alice"), make_key("alice")
    ring = KeyRing(keys_file(tmp_path, f"{old_line} weight=3", new_line), LOG)
    assert [ring.authenticate(f"Bearer {key}").weight for key in (old, new)] == [3.0, 3.0]


def wrong_keys(right: str) -> list[str | None]:
    name, _, secret = right.partition(".")
    bearers = [f"{name}.", f"{name}", f"bob.{secret}", f".{secret}", right[:-1], f"{right}x", right.upper(), "", "ü.ü"]
    return [None, "", right, f"Basic {right}", "Bearer", *(f"Bearer {key}" for key in bearers)]


def test_what_is_no_right_key_is_refused_without_being_quoted(tmp_path: Path) -> None:
    right, line = make_key("alice")
    ring = KeyRing(keys_file(tmp_path, line, make_key("bob")[1]), LOG)
    for wrong in wrong_keys(right):
        with pytest.raises(Unauthenticated) as error:
            ring.authenticate(wrong)
        assert right.partition(".")[2] not in str(error.value)


@given(st.text())
def test_no_text_lets_anybody_in(text: str) -> None:
    class Fixed(KeyRing):
        clients = parse_keys(make_key("alice")[1])

        def __init__(self) -> None: ...

    with pytest.raises(Unauthenticated):
        Fixed().authenticate(text)
    with pytest.raises(Unauthenticated):
        Fixed().authenticate(f"Bearer alice.{text}")


def test_a_file_that_changes_is_read_again_and_a_wrong_one_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (old, old_line), (new, new_line) = make_key("alice"), make_key("bob")
    ring = KeyRing(keys_file(tmp_path, old_line), LOG)
    keys_file(tmp_path, old_line, new_line)
    assert ring.authenticate(f"Bearer {new}").name == "bob"
    keys_file(tmp_path, "alice is not here")
    with caplog.at_level(logging.WARNING, logger="stagemesh.test"):
        for _ in range(3):
            assert ring.authenticate(f"Bearer {old}").name == "alice"
    assert [record.message for record in caplog.records] == ["changed files are not taken: the last good ones stay"]
    keys_file(tmp_path, new_line, "# without the other")
    with pytest.raises(Unauthenticated):
        ring.authenticate(f"Bearer {old}")
    assert ring.authenticate(f"Bearer {new}").name == "bob"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("alice", "line 1 is not"),
        ("alice zz 00", "line 1 is not"),
        ("Alice 00 00", "must be 1..40 characters"),
        ("alice 00 00 weight=0", "above 0"),
        ("alice 00 00 weight=nan", "above 0"),
        ("alice 00 00 heavy=1", "above 0"),
        ("alice 00 00 weight=1 more", "line 1 is not"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(line: str, says: str) -> None:
    with pytest.raises(Rejected, match=says) as error:
        parse_keys(line)
    assert error.value.field == "auth.keys_file"


@given(st.text(max_size=200))
def test_any_text_is_a_keys_file_or_is_rejected(text: str) -> None:
    with suppress(Rejected):
        parse_keys(text)


def test_a_keys_file_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    path = keys_file(tmp_path, make_key("alice")[1])
    path.chmod(0o644)
    with pytest.raises(Rejected, match=r"open to every user \(mode 0644\)"):
        KeyRing(path, LOG)


def keys_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagemesh.shared.cli.main", "keys", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".ns")}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)


def test_the_command_prints_a_key_once_and_takes_it_away(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    said = keys_command("add", "alice", "--file", str(path), "--weight", "2")
    assert said.returncode == 0, said.stderr
    key = said.stdout.strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.partition(".")[2] not in path.read_text()
    ring = KeyRing(path, LOG)
    assert (ring.authenticate(f"Bearer {key}").name, ring.authenticate(f"Bearer {key}").weight) == ("alice", 2.0)
    refused = keys_command("remove", "bob", "--file", str(path))
    assert (refused.returncode, "no key of 'bob'" in refused.stderr) == (2, True)
    assert keys_command("remove", "alice", "--file", str(path)).returncode == 0
    with pytest.raises(Unauthenticated):
        ring.authenticate(f"Bearer {key}")


def test_a_client_reads_its_key_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text(" alice.secret\n")
    path.chmod(0o600)
    monkeypatch.setenv(KEY_VARIABLE, "bob.other")
    assert ClientFiles(api_key_file=str(path)).api_key() == "alice.secret"
    assert ClientFiles().api_key() == "bob.other"
    monkeypatch.setenv(KEY_VARIABLE, "two words")
    with pytest.raises(Rejected) as error:
        ClientFiles().api_key()
    assert "words" not in str(error.value)
    monkeypatch.delenv(KEY_VARIABLE)
    assert ClientFiles().api_key() == ""
