"""The console script: quick to start, and what is wrong is said in a line before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.cli.admin import Target, find_target
from stagemesh.shared.config import look_at_config
from stagemesh.shared.config.address import check_bus_url
from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime.ready import process_start
from tests.support.mesh import ROOT


def stagemesh(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("STAGEMESH_")}
    return subprocess.run(
        [sys.executable, "-m", "stagemesh.shared.cli.main", *arguments],
        env={**inherited, "PYTHONPATH": str(ROOT / ".ns"), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'grpc', 'nats', 'numpy', 'transformers', 'tokenizers', 'asyncio'}"
    script = (
        "import sys; from stagemesh.shared.cli.main import make_app;"
        "make_app()(['up', '--help'], standalone_mode=False);"
        f"sys.exit(str({heavy} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".ns")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "set()"
    assert "--prefill-layers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--dtype", "int4"), "model.dtype: expected one of float32, float64, bfloat16; it is 'int4'"),
        (("up", "--prefill-layers", "a,b"), "--prefill-layers: expected numbers with commas"),
        (("up", "--prefill-layers", "1,2,3"), "instance[0].layers: prefill-0 needs one count a stage"),
        (("up", "--ready-file", "/no/such/place/ready"), "ready_file: its directory /no/such/place does not exist"),
        (("up", "--run-dir", "/proc/none"), "run_dir: cannot use /proc/none"),
        (("up", "--config", "/none"), "config: cannot read /none: No such file or directory"),
        (("up", "--config", "/none", "--prefill-pp", "1"), "--prefill-pp: the layout comes from --config"),
        (("router", "--config", "/none"), "config: cannot read /none: No such file or directory"),
    ],
)
def test_what_is_refused_is_said_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = stagemesh(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


MESH_TOML = """
[mesh]
run_dir = "{run_dir}"
[broker]
listen = "unix:{run_dir}/b.sock"
[model]
path = "smollm2"
[[instance]]
name = "prefill-0"
role = "prefill"
pp_size = 1
stages = ["unix:{run_dir}/p.sock"]
[[instance]]
name = "decode-0"
role = "decode"
pp_size = 1
stages = ["unix:{run_dir}/d.sock"]
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prefill", "--instance", "decode-0", "--rank", "0"), "instance: decode-0 is a decode instance, not prefill"),
        (("decode", "--instance", "decode-9", "--rank", "0"), "no instance is named 'decode-9'"),
        (("decode", "--instance", "decode-0", "--rank", "1"), "rank: no stage 1 of decode-0; there are decode-0/0"),
        (("decode", "--stage", "decode-0:1"), "rank: no stage 1 of decode-0; there are decode-0/0"),
        (("decode", "--stage", "decode-0"), "stage: expected instance:rank, such as decode-0:1; got 'decode-0'"),
        (("decode", "--stage", "decode-0:0", "--rank", "0"), "--stage: names instance and rank already"),
        (("decode", "--instance", "decode-0"), "--stage: is missing"),
        (("nats",), "nats.url: is empty"),
    ],
)
def test_a_stage_that_the_config_does_not_have_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(MESH_TOML.format(run_dir=tmp_path))
    done = stagemesh(*arguments, STAGEMESH_CONFIG=str(path))
    assert done.returncode == 2
    assert says in done.stderr


def target(**given: Any) -> Target:
    nothing = {"nats": "", "ready_file": None, "config": None, "mesh": "local", "credentials": ""}
    return find_target(**{**nothing, "role_on_nats": "admin", **given})


@pytest.mark.parametrize("url", ["nats://", "nats://127.0.0.1:99999", "nats://[::1", "http://here", "nats://h:0"])
def test_what_is_no_address_of_a_bus_is_refused(url: str) -> None:
    with pytest.raises(Rejected, match="--nats: expected nats://host:port or tls://host:port"):
        target(nats=url)
    with pytest.raises(Rejected, match=r"nats\.url: expected"):
        check_bus_url(url, "nats.url")


def test_a_ready_file_says_where_the_bus_is_while_its_mesh_runs(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    bus = {"nats": "nats://127.0.0.1:4222", "nats_credentials": "", "mesh": "mine"}
    record = {"router": "r", **bus, "run_dir": "d", "pid": os.getpid(), "pid_started": process_start(os.getpid())}
    path.write_text(json.dumps(record))
    found = target(ready_file=path)
    assert (found.url, found.mesh) == ("nats://127.0.0.1:4222", "mine")
    path.write_text(json.dumps({**record, "pid_started": 0}))
    with pytest.raises(Rejected, match=r"ready_file: .* was left by a stagemesh that is gone"):
        target(ready_file=path)


def test_a_config_says_where_the_bus_is_and_what_it_does_not_say_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(MESH_TOML.format(run_dir=tmp_path))
    with pytest.raises(Rejected, match=r"nats\.url: is empty, so `stagemesh up` has a server of its own: --ready-file"):
        target(config=path)
    path.write_text(f'{path.read_text()}[nats]\nurl = "nats://127.0.0.1:4222"\ncredentials_dir = "credential:"\n')
    with pytest.raises(Rejected, match="credential: is for units: --nats-credentials says where yours is"):
        target(config=path)
    (tmp_path / "admin").write_text("word")
    (tmp_path / "admin").chmod(0o600)
    found = target(config=path, credentials=str(tmp_path))
    assert (found.url, found.mesh, found.access.password_file) == ("nats://127.0.0.1:4222", "local", tmp_path / "admin")
    assert target(nats="127.0.0.1:4222").url == "nats://127.0.0.1:4222"


def test_a_command_that_is_no_unit_leaves_credentials_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'{MESH_TOML.format(run_dir=tmp_path)}[auth]\nkeys_file = "credential:keys"\n')
    done = stagemesh("config", "check", str(path))
    assert (done.returncode, 'keys_file = "credential:keys"' in done.stdout) == (0, True)
    assert stagemesh("router", "--config", str(path)).stderr.startswith("error: auth.keys_file: credential:keys needs")
    path.write_text(path.read_text().replace("credential:keys", "credential:../keys"))
    with pytest.raises(Rejected, match="no slash"):
        look_at_config(path, {})


def test_its_version_is_said() -> None:
    assert stagemesh("--version").stdout == f"stagemesh {version('stagemesh')}\n"


@pytest.mark.parametrize("router", ["nowhere", "127.0.0.1:99999", "127.0.0.1:0"])
def test_a_router_that_is_no_address_is_refused(router: str) -> None:
    finished = stagemesh("generate", "--router", router, "hello")
    assert finished.returncode == 2
    assert "--router: " in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_router_that_is_not_there_is_said_at_once() -> None:
    finished = stagemesh("check", "--router", "127.0.0.1:1")
    assert (finished.returncode, finished.stderr) == (2, "error: nothing answers at 127.0.0.1:1\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "seven"], "--logit-bias: expected TOKEN_ID=BIAS, got 'seven'"),
        (["--regex", "a", "--json-schema", "{}"], "only one of json-schema, regex and ebnf can be given"),
        (["--ebnf", "@/nonexistent"], "--ebnf: /nonexistent: cannot be read"),
        (["--seed", "-1"], "'--seed'"),
        (["--timeout", "0"], "'--timeout'"),
        (["--max-tokens", str(2**63)], f"max_tokens: cannot be {2**63}"),
        (["--regex", "\udcff"], "regex: is not UTF-8"),
        (["--chat", "\udcff"], "content: is not UTF-8"),
    ],
)
def test_wrong_options_of_an_answer_are_named(options: list[str], message: str) -> None:
    prompt = () if "--chat" in options else ("hello",)
    finished = stagemesh("generate", "--router", "127.0.0.1:1", *options, *prompt)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--device", "cuda"], "model.device: 'cuda' needs a CUDA build of PyTorch"),
        (["--prefill-layers", "4,5"], "instance prefill-0, layers: needs 2 sizes"),
    ],
)
def test_what_can_never_start_is_refused_before_anything_does(options: list[str], message: str) -> None:
    finished = stagemesh("up", *options)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "is ready" not in finished.stderr


def test_what_lets_a_command_in_comes_before_its_name_and_is_used() -> None:
    done = stagemesh("--ca-file", "/none/ca.pem", "generate", "--router", "127.0.0.1:1", "hello")
    assert (done.returncode, "--ca-file: cannot read /none/ca.pem" in done.stderr) == (2, True)
