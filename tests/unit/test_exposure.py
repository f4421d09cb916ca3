"""What the network can reach is asked to be safe, with the key and the remedy in the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.errors import Rejected

TLS = {"cert_file": "/c", "key_file": "/k", "ca_file": "/a"}
KEYS = {"keys_file": "/keys"}
OPEN_STAGES = [
    {"name": "prefill-0", "role": "prefill", "pp_size": 1, "stages": ["10.0.0.1:7001"]},
    {"name": "decode-0", "role": "decode", "pp_size": 1, "stages": ["10.0.0.1:7002"]},
]
MESH = {"run_dir": "/run/stagemesh"}


def build(environ: dict[str, str] | None = None, **tables: Any) -> Config:
    document = {**local_document(LocalLayout(), Path("/run/stagemesh")), **tables}
    return build_config(document, source="mesh.toml", environ=environ or {}, options={})


@pytest.mark.parametrize(
    ("tables", "field", "remedy"),
    [
        ({"router": {"listen": "0.0.0.0:8470"}}, "router.listen", "tls.cert_file"),
        ({"router": {"listen": "0.0.0.0:8470"}, "auth": KEYS}, "router.listen", "tls.cert_file"),
        ({"router": {"listen": "[::]:8470"}, "tls": TLS}, "router.listen", "auth.keys_file"),
        ({"router": {"listen": "mesh.example:8470"}, "tls": TLS}, "router.listen", "auth.keys_file"),
        ({"broker": {"listen": "10.0.0.1:7000"}}, "broker.listen", "tls.cert_file"),
        ({"instance": OPEN_STAGES}, "instance[0].stages[0]", "tls.cert_file"),
        ({"metrics": {"host": "0.0.0.0"}}, "metrics.host", "metrics.private_network = true"),
        ({"metrics": {"host": "0.0.0.0"}, "tls": TLS, "auth": KEYS}, "metrics.host", "private_network"),
        ({"transfer": {"host": "10.0.0.1"}}, "transfer.host", "transfer.private_network = true"),
        ({"transfer": {"host": "10.0.0.1"}, "tls": TLS, "auth": KEYS}, "transfer.host", "private_network"),
        ({"nats": {"url": "nats://10.0.0.1:4222"}}, "nats.url", "tls://"),
        ({"nats": {"url": "nats://[fd00::1]:4222"}, "tls": TLS}, "nats.url", "tls://"),
    ],
)
def test_what_others_can_reach_needs_tls_and_keys_or_a_word(tables: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(Rejected) as error:
        build(**tables)
    assert error.value.field == field
    assert remedy in str(error.value)
    assert "mesh.insecure = true" in str(error.value)
    assert build(**{**tables, "mesh": {**MESH, "insecure": True}}).mesh.insecure


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"router": {"listen": "localhost:8470"}, "broker": {"listen": "[::1]:7000"}},
        {"router": {"listen": "127.1.2.3:8470"}, "nats": {"url": "nats://127.0.0.1:4222"}},
        {"router": {"listen": "0.0.0.0:8470"}, "tls": TLS, "auth": KEYS},
        {
            "router": {"listen": "127.0.0.1:8470"},
            "instance": OPEN_STAGES,
            "tls": TLS,
            "transfer": {"private_network": True},
        },
        {"transfer": {"host": "10.0.0.1", "private_network": True}},
        {"nats": {"url": "tls://nats.example:4222"}},
        {"metrics": {"host": "0.0.0.0", "enabled": False}},
        {"metrics": {"host": "0.0.0.0", "private_network": True}},
    ],
)
def test_what_is_safe_or_stays_on_this_host_needs_no_word(tables: dict[str, Any]) -> None:
    assert not build(**tables).mesh.insecure


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ({"tls": {"cert_file": "/c", "ca_file": "/a"}}, "tls.key_file"),
        ({"tls": {**TLS, "public_key_file": "/k"}}, "tls.public_cert_file"),
        ({"tls": {"public_client_ca_file": "/a"}}, "tls.public_client_ca_file"),
        ({"tls": {**TLS, "key_file": "relative"}}, "tls.key_file"),
        ({"auth": {"keys_file": "credential:keys"}}, "auth.keys_file"),
        ({"mesh": {**MESH, "name": "events"}}, "mesh.name"),
        ({"nats": {"url": "nats://stage:secret@127.0.0.1:4222"}}, "nats.url"),
    ],
)
def test_files_that_do_not_fit_together_are_named(tables: dict[str, Any], field: str) -> None:
    with pytest.raises(Rejected) as error:
        build(**tables)
    assert error.value.field == field
    assert "secret" not in str(error.value)


def test_a_credential_of_the_unit_is_a_file_in_its_directory() -> None:
    environ = {"CREDENTIALS_DIRECTORY": "/run/credentials/router"}
    tls = {**TLS, "key_file": "credential:mesh-key"}
    config = build(environ, tls=tls, auth={"keys_file": "credential:keys"}, nats={"credentials_dir": "credential:"})
    assert config.tls.key_file == "/run/credentials/router/mesh-key"
    assert config.auth.keys_file == "/run/credentials/router/keys"
    assert config.nats.credentials_dir == "/run/credentials/router"
    with pytest.raises(Rejected, match="no slash"):
        build(environ, auth={"keys_file": "credential:../keys"})
