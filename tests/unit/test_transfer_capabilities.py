"""What a config gets of each backend, and what is done about what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import configure
from stagemesh.shared.transfer import mooncake, nixl
from stagemesh.shared.transfer.backends import open_endpoint
from stagemesh.shared.transfer.capabilities import (
    KNOWN,
    LARGE_BATCH_BYTES,
    SMALL_BATCH_BYTES,
    Capabilities,
    choose_protocol,
    reap_is_proof,
    table,
)

MIB = 1 << 20
HERE, ELSEWHERE = "127.0.0.1", "192.0.2.1"


@pytest.mark.parametrize(
    ("backend", "device", "protocol"),
    [("mooncake", "cpu", "tcp"), ("mooncake", "cuda", "rdma"), ("nixl", "cpu", "auto"), ("nixl", "cuda", "auto")],
)
def test_over_several_hosts_nothing_stays_in_one(backend: Any, device: str, protocol: str) -> None:
    section = TransferSection(backend=backend, host=ELSEWHERE)
    assert choose_protocol(section, device, one_host=False) == protocol
    assert reap_is_proof(section, device, one_host=False) is (protocol != "rdma")


@pytest.mark.parametrize(
    ("backend", "device", "host", "protocol"),
    [
        ("mooncake", "cpu", HERE, "tcp"),
        ("mooncake", "cuda", HERE, "intranode"),
        ("mooncake", "cuda", ELSEWHERE, "intranode"),
        ("nixl", "cpu", HERE, "intranode"),
        ("nixl", "cpu", ELSEWHERE, "auto"),
        ("nixl", "cuda", HERE, "intranode"),
        ("nixl", "cuda", ELSEWHERE, "auto"),
    ],
)
def test_how_kv_travels_follows_from_where_it_lies(backend: Any, device: str, host: str, protocol: str) -> None:
    assert choose_protocol(TransferSection(backend=backend, host=host), device) == protocol
    assert choose_protocol(TransferSection(backend=backend, host=host, protocol="tcp"), device) == "tcp"


@pytest.mark.parametrize(
    ("backend", "device", "protocol", "why"),
    [
        ("memory", "cpu", "auto", "transfer.backend: 'memory' does not work between processes"),
        ("memory", "cuda", "auto", "transfer.backend: 'memory' does not move memory of model.device 'cuda'"),
        ("mooncake", "cpu", "intranode", "transfer.protocol: 'intranode' is not what 'mooncake' does .*: tcp, rdma"),
        ("nixl", "cpu", "rdma", "transfer.protocol: 'rdma' is not what 'nixl' does .*: intranode, auto, tcp"),
    ],
)
def test_what_a_backend_cannot_do_at_all_is_refused_at_start(
    backend: Any, device: str, protocol: Any, why: str
) -> None:
    with pytest.raises(Rejected, match=why):
        open_endpoint(TransferSection(backend=backend, protocol=protocol), device, configure("test"))


def test_a_backend_whose_lanes_wait_for_each_other_gets_small_batches() -> None:
    assert Capabilities(lanes_apart=False).batch_bytes(16 * MIB) == SMALL_BATCH_BYTES
    assert Capabilities(lanes_apart=False).batch_bytes(MIB) == MIB
    assert Capabilities(one_copy=True).batch_bytes(16 * MIB) == LARGE_BATCH_BYTES
    assert Capabilities().batch_bytes(16 * MIB) == 16 * MIB


@pytest.mark.parametrize(("backend", "device", "protocol"), [known for known in KNOWN if known[0] != "memory"])
def test_an_endpoint_is_opened_as_its_capabilities_ask(
    backend: Any, device: str, protocol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(mooncake, "MooncakeEndpoint", opened.append)
    monkeypatch.setattr(nixl, "NixlEndpoint", opened.append)
    host = ELSEWHERE if protocol == "auto" else HERE
    open_endpoint(TransferSection(backend=backend, protocol=protocol, host=host), device, configure("test"))
    (settings,) = opened
    assert settings.protocol == protocol
    assert settings.max_batch_bytes == KNOWN[backend, device, protocol].batch_bytes(16 * MIB)


def test_the_readme_shows_the_capabilities() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert "\n".join(table()) in readme
