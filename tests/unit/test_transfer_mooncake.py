"""What is particular to the Mooncake backend: real processes that die, threads, listeners, its settings."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from stagemesh.shared.errors import Exhausted, PeerLost, ProtocolViolation, Rejected, Retryable, StagemeshError
from stagemesh.shared.transfer.base import Lane, Piece, RegionKey, TransferState
from stagemesh.shared.transfer.listeners import confine_to_loopback, listeners_since, listening_inodes
from stagemesh.shared.transfer.mooncake import (
    MIN_TIMEOUT_S,
    MooncakeEndpoint,
    MooncakeSettings,
    create_engine,
    split_name,
)
from tests.unit.transfer_target import TargetProcess


@asynccontextmanager
async def opened(settings: MooncakeSettings | None = None) -> AsyncIterator[MooncakeEndpoint]:
    """An endpoint that is closed also when the test fails, so that one failure stays one."""
    endpoint = MooncakeEndpoint(settings)
    try:
        yield endpoint
    finally:
        await endpoint.close()


MIB = 1 << 20
NUM_BYTES = 64 * MIB


def test_a_target_that_is_killed_is_noticed_and_its_successor_is_reached() -> None:
    target, successor = TargetProcess(NUM_BYTES), TargetProcess(MIB)

    async def main() -> None:
        async with opened(MooncakeSettings(max_batch_bytes=MIB)) as writer:
            region = writer.register(torch.ones(NUM_BYTES, dtype=torch.uint8))
            pieces = [Piece(region.address, target.key.address, NUM_BYTES)]
            async with asyncio.timeout(60):
                await writer.write(target.key, [Piece(region.address, target.key.address, MIB)]).wait()
                running = writer.write(target.key, pieces)
                target.process.kill()
                with pytest.raises((PeerLost, Retryable)):  # its listener may outlive its connections by a moment
                    await running.wait()
                target.process.wait()
                assert (running.state, running.quiescent) == (TransferState.FAILED, False)
                for lane in Lane:
                    with pytest.raises(PeerLost):
                        await writer.write(target.key, pieces, lane).wait()
                other = writer.write(successor.key, [Piece(region.address, successor.key.address, MIB)])
                await other.wait()
                assert successor.count() == MIB

    try:
        asyncio.run(main())
    finally:
        target.close()
        successor.close()


@pytest.mark.slow
def test_a_write_to_a_stopped_process_fails_without_quiescence_and_its_memory_is_kept() -> None:
    target = TargetProcess(MIB)

    async def main() -> None:
        async with opened(MooncakeSettings(timeout_s=MIN_TIMEOUT_S)) as writer:
            memory = torch.ones(MIB, dtype=torch.uint8)
            kept = weakref.ref(memory)
            region = writer.register(memory)
            pieces = [Piece(region.address, target.key.address, MIB)]
            async with asyncio.timeout(60):
                await writer.write(target.key, [Piece(region.address, target.key.address, 1)]).wait()
                target.stop()
                handle = writer.write(target.key, pieces)
                with pytest.raises(Retryable):
                    await handle.wait()
                assert (handle.state, handle.quiescent) == (TransferState.FAILED, False)
                del memory
                writer.unregister(region)
                assert kept() is not None  # the engine may read it yet
                target.process.send_signal(signal.SIGCONT)
                again = writer.register(torch.ones(MIB, dtype=torch.uint8))
                await writer.write(target.key, [Piece(again.address, target.key.address, MIB)]).wait()
                assert target.count() == MIB
        assert kept() is None

    try:
        asyncio.run(main())
    finally:
        target.close()


def test_close_ends_every_thread_and_listener() -> None:
    async def main() -> None:
        async with opened(MooncakeSettings(num_bulk_threads=2)) as writer:
            assert sum(thread.name.startswith("transfer-") for thread in threading.enumerate()) == 3
            region = writer.register(torch.ones(MIB, dtype=torch.uint8))
            for lane in Lane:  # to itself, which is a peer like any other
                key = writer.publish(region)
                await writer.write(key, [Piece(region.address, region.address + 1000, 1000)], lane).wait()

    asyncio.run(main())  # whatever the library keeps for good is there after the first
    num_threads, listening = len(os.listdir("/proc/self/task")), listening_inodes()
    asyncio.run(main())
    assert len(os.listdir("/proc/self/task")) <= num_threads
    assert listening_inodes() <= listening
    assert not any(thread.name.startswith("transfer-") for thread in threading.enumerate())


def own_address() -> str | None:
    """An address of this host that is not loopback, if it has one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


needs_address = pytest.mark.skipif(own_address() is None, reason="this host has no address but loopback")


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 0.3).close()
    except TimeoutError:
        return False
    return True


@needs_address
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_confined_listener_answers_loopback_alone(family: socket.AddressFamily) -> None:
    address = own_address()
    assert address is not None
    before = listening_inodes()
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((address, port), 5) as earlier:
            served, _ = listener.accept()
            new = listeners_since(before)
            assert [duplicate.getsockname()[1] for duplicate in new] == [port]
            confine_to_loopback(new)
            for duplicate in new:
                duplicate.close()
            earlier.settimeout(5)
            assert earlier.recv(1) == b""  # what had come from elsewhere is cut
            served.close()
        assert reaches("127.0.0.1", port)
        assert not reaches(address, port)


@needs_address
def test_an_engine_on_loopback_listens_to_loopback_alone() -> None:
    address = own_address()
    assert address is not None

    async def main() -> None:
        before = listening_inodes()
        async with opened() as writer:
            found = listeners_since(before)
            ports = [listener.getsockname()[1] for listener in found]
            for listener in found:
                listener.close()
            assert len(ports) == 2  # handshake and data
            assert int(split_name(writer.name)[0].rpartition(":")[2]) in ports
            assert all(reaches("127.0.0.1", port) for port in ports)
            assert not any(reaches(address, port) for port in ports)

    asyncio.run(main())


def test_open_writes_are_bounded() -> None:
    async def main() -> None:
        async with opened(MooncakeSettings(max_open_writes=1)) as writer:
            region = writer.register(torch.ones(MIB, dtype=torch.uint8))
            key, pieces = writer.publish(region), [Piece(region.address, region.address + 1000, 1000)]
            first = writer.write(key, pieces)
            with pytest.raises(Exhausted):
                writer.write(key, pieces)
            await first.wait()
            await writer.write(key, pieces).wait()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "host", "host:1", ":1#a", "host:0#a", "host:x#a", "host:70000#a", "host:1#"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    async def main() -> None:
        async with opened() as writer:
            region = writer.register(torch.ones(10, dtype=torch.uint8))
            with pytest.raises(ProtocolViolation, match="not a transfer endpoint"):
                writer.write(RegionKey(name, 0, 10), [Piece(region.address, 0, 10)])

    asyncio.run(main())


def test_a_library_that_cannot_be_loaded_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MooncakeSettings().environment():
        monkeypatch.setenv(name, "")  # so that they are put back
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(StagemeshError, match="libibverbs1 librdmacm1 libnuma1"):
        create_engine(MooncakeSettings())


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": 4}, {"max_batch_bytes": 0}, {"num_bulk_threads": 0}, {"max_batch_pieces": 1000}],
    ids=str,
)
def test_settings_that_the_engine_would_not_keep_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(Rejected):
        MooncakeSettings(**wrong)  # type: ignore[arg-type]


class NotOurs:
    """A listener that the kernel lets this process not filter."""

    def getsockname(self) -> tuple[str, int]:
        return ("0.0.0.0", 12_345)

    def setsockopt(self, *_: object) -> None:
        raise PermissionError(1, "Operation not permitted")


def test_without_the_right_to_confine_its_ports_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(Rejected, match=r"transfer\.host: cannot confine port 12345 .*transfer\.private_network = true"):
        confine_to_loopback([NotOurs()])  # type: ignore[list-item]


def test_ports_that_others_protect_need_no_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise Rejected("transfer.host", "not allowed")

    monkeypatch.setattr("stagemesh.shared.transfer.mooncake.confine_to_loopback", refuse)

    async def run() -> None:
        await MooncakeEndpoint(MooncakeSettings(private_network=True)).close()
        with pytest.raises(Rejected, match="not allowed"):
            MooncakeEndpoint(MooncakeSettings())

    asyncio.run(run())
