"""What is particular to the NIXL backend: peers that come and go, keys, settings. The agent here is a scripted one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagemesh.shared.config import TransferSection
from stagemesh.shared.errors import PeerLost, ProtocolViolation, Rejected, Retryable, StagemeshError
from stagemesh.shared.obs.log import configure
from stagemesh.shared.transfer import nixl_peers
from stagemesh.shared.transfer.backends import open_endpoint
from stagemesh.shared.transfer.base import Lane
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.nixl import NixlEndpoint, NixlSettings, create_agent
from stagemesh.shared.transfer.nixl_agent import NixlKey, Place, parse_key
from stagemesh.shared.transfer.nixl_sender import NixlSender
from stagemesh.shared.transfer.writes import Failure

BATCH = Batch([1], [2], [3], 3)
KEY = str(NixlKey("peer", 0, Place(), b"peer"))


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - it is known by this name
    pass


class ScriptedAgent:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.described: list[tuple[str, list[tuple[int, int, int]]]] = []
        self.meet: Callable[[], None] = lambda: None
        self.prepare: Callable[[], None] = lambda: None
        self.states: list[str] = []
        self.post: Callable[[], str] = lambda: "DONE"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.asked.append("add")
        self.meet()
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.asked.append("remove")

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], memory: str) -> Any:
        self.described.append((memory, descriptors))
        return descriptors

    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str) -> Any:
        self.prepare()
        return object()

    def transfer(self, handle: Any) -> str:
        self.asked.append("post")
        return self.post()

    def check_xfer_state(self, handle: Any) -> str:
        return self.states.pop(0) if self.states else "PROC"

    def release_xfer_handle(self, handle: Any) -> None:
        self.asked.append("release")

    def register_memory(self, descriptors: list[tuple[int, int, int, str]], memory: str) -> Any: ...
    def deregister_memory(self, registered: Any) -> None: ...
    def get_partial_agent_metadata(self, registered: Any, with_connection: bool, backends: list[str]) -> bytes:
        return b""


def raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def failure_of(found: Failure | None) -> Failure:
    assert found is not None
    return found


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


def make_sender(agent: ScriptedAgent, place: Place | None = None, timeout_s: float = 60.0) -> NixlSender:
    return NixlSender(agent, "own", timeout_s=timeout_s, connect_timeout_s=2.0, place=place or Place())


@pytest.fixture
def sender(agent: ScriptedAgent) -> NixlSender:
    return make_sender(agent)


def test_a_peer_is_met_once_and_a_handle_is_always_released(agent: ScriptedAgent, sender: NixlSender) -> None:
    agent.post, agent.states = lambda: "PROC", ["PROC", "DONE"]
    assert sender.send(KEY, BATCH, Lane.BULK) is None
    agent.post = lambda: "DONE"
    assert sender.send(KEY, BATCH, Lane.URGENT) is None
    assert agent.asked == ["add", "post", "release", "post", "release"]


def test_a_connection_that_broke_is_in_doubt_and_is_made_anew(agent: ScriptedAgent, sender: NixlSender) -> None:
    agent.post = raising(nixlRemoteDisconnectError())
    failure = failure_of(sender.send(KEY, BATCH, Lane.BULK))
    assert isinstance(failure.error, PeerLost)
    assert not failure.proven
    agent.post = lambda: "DONE"
    assert sender.send(KEY, BATCH, Lane.BULK) is None
    assert agent.asked == ["add", "post", "release", "remove", "add", "post", "release"]


def test_what_was_never_posted_is_proven_to_be_over(agent: ScriptedAgent, sender: NixlSender) -> None:
    agent.prepare = raising(KeyError("no such region"))
    failure = failure_of(sender.send(KEY, BATCH, Lane.BULK))
    assert isinstance(failure.error, Retryable)
    assert failure.proven
    agent.prepare, agent.post = lambda: None, raising(ValueError("half of it"))
    assert not failure_of(sender.send(KEY, BATCH, Lane.BULK)).proven


@pytest.mark.parametrize("end", ["PROC", "ERR"])
def test_a_write_that_does_not_end_or_ends_wrong_is_in_doubt(agent: ScriptedAgent, end: str) -> None:
    agent.post = lambda: end
    failure = failure_of(make_sender(agent, timeout_s=0.01).send(KEY, BATCH, Lane.BULK))
    assert isinstance(failure.error, Retryable)
    assert not failure.proven
    assert agent.asked[-1] == "release"


def test_a_peer_that_is_not_there_is_tried_again_but_not_at_once(
    agent: ScriptedAgent, sender: NixlSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.meet = raising(OSError("refused"))
    for _ in range(3):
        failure = failure_of(sender.send(KEY, BATCH, Lane.BULK))
        assert isinstance(failure.error, PeerLost)
        assert failure.proven
    assert agent.asked.count("add") == 1
    agent.meet = lambda: None
    monkeypatch.setattr(nixl_peers, "AGAIN_AFTER_S", 0.0)
    assert sender.send(KEY, BATCH, Lane.BULK) is None


def test_metadata_of_another_peer_is_refused(agent: ScriptedAgent, sender: NixlSender) -> None:
    failure = failure_of(sender.send(str(NixlKey("peer", 0, Place(), b"other")), BATCH, Lane.BULK))
    assert isinstance(failure.error, ProtocolViolation)
    assert failure.proven
    assert "post" not in agent.asked


def test_memory_is_described_where_it_is_on_each_side(agent: ScriptedAgent) -> None:
    sender = make_sender(agent, Place("VRAM", 1))
    assert sender.send(str(NixlKey("peer", 0, Place("VRAM", 2), b"peer")), BATCH, Lane.BULK) is None
    assert sender.send(KEY, BATCH, Lane.BULK) is None
    here = ("VRAM", [(1, 3, 1)])
    assert agent.described == [here, ("VRAM", [(2, 3, 2)]), here, ("DRAM", [(2, 3, 0)])]


@pytest.mark.parametrize("place", [Place(), Place("VRAM", 7)], ids=str)
def test_a_key_carries_what_peers_need(place: Place) -> None:
    for host in ("127.0.0.1", "::1"):
        key = NixlKey(f"{host}#ab", 1234, place, b"\x00\xffmeta")
        assert parse_key(str(key)) == key
        assert key.host == host


WRONG = ("a:1:DRAM0:", ":1:DRAM0:bWV0YQ==", "a:1:DRAM0:no base64", "127.0.0.1:1#0", "a:bWV0YQ==", "a:DRAM0:bWV0YQ==")
WRONG_PARTS = ("a:1:FILE0:bWV0YQ==", "a:1:VRAM:bWV0YQ==", "a:1:VRAM-1:bWV0YQ==", "a:1:VRAM123456:bWV0YQ==")
WRONG_PORTS = ("a::DRAM0:bWV0YQ==", "a:x:DRAM0:bWV0YQ==", "a:70000:DRAM0:bWV0YQ==")


@pytest.mark.parametrize("endpoint", ["", "name", "name:", *WRONG, *WRONG_PARTS, *WRONG_PORTS])
def test_a_key_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ProtocolViolation, match="not a NIXL endpoint"):
        parse_key(endpoint)


def test_a_peer_that_does_not_listen_is_never_shown_to_the_library(agent: ScriptedAgent, sender: NixlSender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        name = "127.0.0.1#a"
        assert sender.send(str(NixlKey(name, port, Place(), name.encode())), BATCH, Lane.BULK) is None
    for _ in range(2):
        failure = failure_of(sender.send(str(NixlKey("127.0.0.1#b", port, Place(), b"127.0.0.1#b")), BATCH, Lane.BULK))
        assert isinstance(failure.error, PeerLost)
        assert failure.proven
    assert agent.asked.count("add") == 1


def test_a_broken_peer_that_is_gone_is_forgotten(agent: ScriptedAgent, sender: NixlSender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        key = str(NixlKey("127.0.0.1#a", listener.getsockname()[1], Place(), b"127.0.0.1#a"))
        agent.post = raising(nixlRemoteDisconnectError())
        assert not failure_of(sender.send(key, BATCH, Lane.BULK)).proven
    assert "remove" not in agent.asked
    assert failure_of(sender.send(key, BATCH, Lane.BULK)).proven
    assert agent.asked.count("remove") == 1


def test_peers_are_bounded(agent: ScriptedAgent, sender: NixlSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peers, "MAX_PEERS", 2)
    for name in ("a", "b", "c", "a"):
        assert sender.send(str(NixlKey(name, 0, Place(), name.encode())), BATCH, Lane.BULK) is None
    assert (agent.asked.count("add"), agent.asked.count("remove")) == (4, 2)


def test_a_loopback_host_stays_on_loopback() -> None:
    assert NixlSettings().environment()["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in NixlSettings(host="192.0.2.1").environment()


def test_gpus_get_the_transports_that_reach_them() -> None:
    assert "cuda" not in NixlSettings().environment()["UCX_TLS"]
    for protocol in ("auto", "intranode"):
        assert "cuda_ipc" in NixlSettings(device="cuda", protocol=protocol).environment()["UCX_TLS"]
    assert NixlSettings(device="cuda", protocol="tcp").environment()["UCX_TLS"] == "self,tcp,cuda_copy"


@pytest.mark.parametrize("wrong", [{"protocol": "rdma"}, {"max_batch_bytes": 0}, {"num_bulk_threads": 0}], ids=str)
def test_settings_that_cannot_be_kept_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(Rejected):
        NixlSettings(**wrong)


def test_memory_that_is_elsewhere_and_the_twin_are_refused() -> None:
    async def main() -> None:
        endpoint = NixlEndpoint()
        try:
            with pytest.raises(Rejected, match="must be on cpu:0, is on meta"):
                endpoint.register(torch.empty(4, device="meta"))
        finally:
            await endpoint.close()

    asyncio.run(main())
    with pytest.raises(Rejected, match="does not work between processes"):
        open_endpoint(TransferSection(backend="memory"), "cpu", configure("test"))


def test_a_library_that_cannot_be_loaded_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NixlSettings().environment():
        monkeypatch.setenv(name, "")  # so that they are put back
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(StagemeshError, match="nixl and nixl-cu12"):
        create_agent("name", NixlSettings())
