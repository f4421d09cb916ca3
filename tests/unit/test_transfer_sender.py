"""What the sender concludes from what the engine says. A script stands in for the engine, a listener for the peer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from stagemesh.shared.errors import PeerLost, Retryable
from stagemesh.shared.transfer.base import Lane
from stagemesh.shared.transfer.batches import Batch
from stagemesh.shared.transfer.sender import NOT_SUBMITTED, PENDING, SUCCEEDED, Sender
from stagemesh.shared.transfer.writes import Failure

FAILED = -1
BATCH = Batch([0, 10, 20], [100, 110, 120], [10, 10, 10], 30)


class ScriptedEngine:
    """`statuses[i]` is what piece i says, one after the other, the last one for good; None: it is not taken."""

    def __init__(self, statuses: list[list[int] | None] | None = None, *, code: int | Exception = 0) -> None:
        self.statuses = [list(says) if says else None for says in statuses or []]
        self.code = code
        self.calls: list[str] = []

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int:
        raise NotImplementedError

    def get_rpc_port(self) -> int:
        raise NotImplementedError

    def register_memory(self, address: int, length: int, /) -> int:
        raise NotImplementedError

    def unregister_memory(self, address: int, /) -> int:
        raise NotImplementedError

    def batch_transfer_sync_write(
        self, peer: str, sources: list[int], targets: list[int], lengths: list[int], /
    ) -> int:
        self.calls.append(f"sync {len(sources)}")
        if isinstance(self.code, Exception):
            raise self.code
        return self.code

    def transfer_submit_write(self, peer: str, source: int, target: int, length: int, /) -> int:
        index = source // 10
        self.calls.append(f"submit {index}")
        return NOT_SUBMITTED if self.statuses[index] is None else index + 1

    def transfer_check_status(self, transfer_id: int, /) -> int:
        says = self.statuses[transfer_id - 1]
        assert says, "an id is void after its final status"
        status = says.pop(0)
        if status == PENDING and not says:
            says.append(PENDING)
        return status


@pytest.fixture
def peer() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def gone() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def sender_of(engine: ScriptedEngine, timeout_s: float = 60) -> Sender:
    return Sender(engine, timeout_s=timeout_s, connect_timeout_s=2)


def failure_of(found: Failure | None) -> Failure:
    assert found is not None
    return found


def test_a_bulk_batch_waits_for_every_piece(peer: str) -> None:
    engine = ScriptedEngine([[PENDING, PENDING, SUCCEEDED], [SUCCEEDED], [PENDING, SUCCEEDED]])
    assert sender_of(engine).send(peer, "a", BATCH, Lane.BULK) is None
    assert engine.statuses == [[], [], []]
    assert engine.calls == ["submit 0", "submit 1", "submit 2"]


def test_an_urgent_batch_is_one_call(peer: str) -> None:
    engine = ScriptedEngine()
    assert sender_of(engine).send(peer, "a", BATCH, Lane.URGENT) is None
    assert engine.calls == ["sync 3"]


def test_a_failed_piece_is_no_reason_not_to_wait_for_the_others(peer: str) -> None:
    engine = ScriptedEngine([[FAILED], [PENDING, SUCCEEDED], [FAILED]])
    failure = failure_of(sender_of(engine).send(peer, "a", BATCH, Lane.BULK))
    assert engine.statuses == [[], [], []]
    assert isinstance(failure.error, Retryable)
    assert "2 of 3 pieces failed" in str(failure.error)
    assert not failure.proven


def test_a_piece_that_is_not_taken_fails_the_batch_after_those_that_were(peer: str) -> None:
    engine = ScriptedEngine([[PENDING, SUCCEEDED], None, [SUCCEEDED]])
    failure = failure_of(sender_of(engine).send(peer, "a", BATCH, Lane.BULK))
    assert engine.statuses[0] == []
    assert "submit 2" not in engine.calls
    assert not failure.proven


def test_a_batch_of_which_nothing_was_taken_is_proven_to_be_over(peer: str) -> None:
    failure = failure_of(sender_of(ScriptedEngine([None, None, None])).send(peer, "a", BATCH, Lane.BULK))
    assert isinstance(failure.error, Retryable)
    assert failure.proven


def test_a_piece_past_its_time_is_unproven(peer: str) -> None:
    engine = ScriptedEngine([[SUCCEEDED], [PENDING], [SUCCEEDED]])
    failure = failure_of(sender_of(engine, timeout_s=0).send(peer, "a", BATCH, Lane.BULK))
    assert "2 of 3 pieces not done in time" in str(failure.error)
    assert not failure.proven


@pytest.mark.parametrize("code", [-1, RuntimeError("inside the library")], ids=str)
def test_an_urgent_failure_is_unproven(peer: str, code: int | Exception) -> None:
    failure = failure_of(sender_of(ScriptedEngine(code=code)).send(peer, "a", BATCH, Lane.URGENT))
    assert isinstance(failure.error, Retryable)
    assert not failure.proven


@pytest.mark.parametrize("lane", Lane)
def test_a_peer_that_was_never_there_is_lost_before_the_engine_is_asked(gone: str, lane: Lane) -> None:
    engine = ScriptedEngine()
    failure = failure_of(sender_of(engine).send(gone, "a", BATCH, lane))
    assert isinstance(failure.error, PeerLost)
    assert (failure.proven, engine.calls) == (True, [])


class DyingPeer(ScriptedEngine):
    """The peer stops listening while it is written to."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(code=-1)
        self.listener = listener

    def batch_transfer_sync_write(
        self, peer: str, sources: list[int], targets: list[int], lengths: list[int], /
    ) -> int:
        self.listener.close()
        return super().batch_transfer_sync_write(peer, sources, targets, lengths)


def test_a_peer_that_goes_while_it_is_written_to_is_lost_but_unproven() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        engine = DyingPeer(listener)
        sender = sender_of(engine)
        during, after = (failure_of(sender.send(address, "a", BATCH, Lane.URGENT)) for _ in range(2))
    assert isinstance(during.error, PeerLost)
    assert isinstance(after.error, PeerLost)
    assert (during.proven, after.proven) == (False, True)
    assert engine.calls == ["sync 3"]  # the second time nothing is sent to find out


def test_another_process_on_a_known_port_is_refused_and_has_this_one_end(peer: str) -> None:
    """Writes in doubt do: it is started again, and knows nobody."""
    engine = ScriptedEngine()
    sender = sender_of(engine)
    assert sender.send(peer, "a", BATCH, Lane.URGENT) is None
    for _ in range(2):
        failure = failure_of(sender.send(peer, "b", BATCH, Lane.URGENT))
        assert isinstance(failure.error, PeerLost)
        assert (failure.proven, engine.calls) == (False, ["sync 3"])
