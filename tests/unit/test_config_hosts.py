"""What a config over several hosts means for each process, and what of it cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.hosts import listen_address, mesh_hosts, stage_threads, stage_transfer
from stagemesh.shared.errors import Rejected

HERE, THERE = "10.0.0.1", "10.0.0.2"


def document(prefill: list[str], decode: list[str], **changes: Any) -> dict[str, Any]:
    instances = [
        {"name": f"{role}-0", "role": role, "pp_size": len(stages), "stages": stages}
        for role, stages in (("prefill", prefill), ("decode", decode))
    ]
    mesh = {"run_dir": "/run/stagemesh", "insecure": True}
    tables = {"mesh": mesh, "broker": {"listen": f"{HERE}:8471"}, "model": {"path": "m"}}
    return {**tables, "instance": instances, **changes}


def build(tables: dict[str, Any]) -> Config:
    return build_config(tables, source="mesh.toml", environ={})


SPREAD = document([f"{HERE}:1", f"{THERE}:1"], [f"{HERE}:2", f"{HERE}:3"])
UNIX = document(["unix:/run/p.sock"], ["127.0.0.1:5"], broker={"listen": "unix:/run/b.sock"})


def test_threads_are_shared_out_among_the_stages_of_a_host_and_never_none() -> None:
    spread = build(SPREAD)
    assert [stage_threads(spread, f"{HERE}:1", cores) for cores in (1, 3, 7)] == [1, 1, 2]
    assert stage_threads(spread, f"{THERE}:1", 7) == 7
    assert stage_threads(build(UNIX), "unix:/run/p.sock", 8) == 4
    assert stage_threads(build({**UNIX, "engine": {"threads": 3}}), "unix:/run/p.sock", 1) == 3


def test_peers_are_told_the_host_of_the_stage_unless_the_config_names_one() -> None:
    spread = build(SPREAD)
    assert [stage_transfer(spread, f"{host}:1").host for host in (HERE, THERE)] == [HERE, THERE]
    assert stage_transfer(build(UNIX), "unix:/run/p.sock").host == "127.0.0.1"
    assert stage_transfer(build({**SPREAD, "transfer": {"host": "ib0.example"}}), f"{HERE}:1").host == "ib0.example"
    assert stage_transfer(build(document(["[fd00::1]:1"], ["[fd00::2]:1"])), "[fd00::1]:1").host == "fd00::1"


def test_a_process_listens_where_it_is_found_or_at_the_same_port_of_the_listen_host() -> None:
    assert listen_address(build(SPREAD), f"{THERE}:1") == f"{THERE}:1"
    behind = build({**SPREAD, "mesh": {"run_dir": "/run/stagemesh", "insecure": True, "listen_host": "0.0.0.0"}})
    assert listen_address(behind, f"{THERE}:1") == "0.0.0.0:1"
    assert listen_address(behind, "unix:/run/b.sock") == "unix:/run/b.sock"


def test_loopback_and_unix_sockets_are_one_host() -> None:
    assert mesh_hosts(build(UNIX)) == {"this host"}


@pytest.mark.parametrize(
    ("tables", "field", "says"),
    [
        (document(["0.0.0.0:1"], [f"{HERE}:2"]), "instance[0].stages[0]", "mesh.listen_host to listen"),
        ({**SPREAD, "broker": {"listen": "0.0.0.0:8471"}}, "broker.listen", "nobody can connect to 0.0.0.0:8471"),
        ({**SPREAD, "broker": {"listen": "unix:/b"}}, "broker.listen", "unix:/b cannot be reached from 10.0.0.1, 10.0"),
        (document(["127.0.0.1:1"], [f"{HERE}:2"]), "instance[0].stages[0]", "127.0.0.1:1 cannot be reached from 10.0"),
        ({**SPREAD, "transfer": {"protocol": "intranode"}}, "transfer.protocol", "stays in one host"),
        (
            {**SPREAD, "model": {"path": "m", "device": "cuda"}},
            "instance[0].stages",
            "prefill-0 is on 10.0.0.1, 10.0.0.2",
        ),
    ],
)
def test_what_cannot_be_reached_is_refused(tables: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(Rejected) as caught:
        build(tables)
    assert caught.value.field == field
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ({**SPREAD, "tls": {"cert_file": "/c", "key_file": "/k", "ca_file": "/a"}}, "transfer.host"),
        ({**UNIX, "mesh": {"run_dir": "/r", "listen_host": "0.0.0.0"}}, "instance[1].stages[0]"),
    ],
)
def test_what_is_told_to_other_hosts_or_listens_for_them_is_exposed(tables: dict[str, Any], field: str) -> None:
    with pytest.raises(Rejected) as caught:
        build({**tables, "mesh": {**tables["mesh"], "insecure": False}})
    assert caught.value.field == field


def test_instances_on_gpus_may_be_on_different_hosts() -> None:
    cuda = {"model": {"path": "m", "device": "cuda"}}
    assert mesh_hosts(build(document([f"{HERE}:1", f"{HERE}:2"], [f"{THERE}:1"], **cuda))) == {HERE, THERE}
