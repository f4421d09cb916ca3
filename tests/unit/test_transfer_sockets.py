"""What the kernel holds of processes that have ended, told from real ones that are killed in the middle of a write."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stagemesh.shared.transfer import sockets
from stagemesh.shared.transfer.sockets import (
    TcpState,
    host_sockets,
    num_unread,
    parse_table,
    unsent,
    until_read,
    until_sent,
)

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:A12C 04 00001000:00000000 01:00000014 00000000     0        0 0 3
   2: 0000000000000000FFFF00000100007F:1F90 00000000000000000000000001000000:0050 01 0:0 0:0 0 0 0 12 1 0
"""
SENDER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"x")
sys.stdin.readline()
s.setblocking(False)
try:
    while True:
        s.send(bytes(1 << 16))
except BlockingIOError:
    print("full", flush=True)
sys.stdin.readline()
"""


def start_sender(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SENDER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_table_of_the_kernel_is_read() -> None:
    listening, closing, mapped = parse_table(TABLE, set(TcpState))
    assert (listening.connection, listening.state, listening.inode) == (
        (("127.0.0.1", 8080), ("0.0.0.0", 0)),
        TcpState.LISTEN,
        4711,
    )
    assert (closing.state, closing.inode) == (TcpState.FIN_WAIT1, 0)
    assert mapped.connection == (("127.0.0.1", 8080), ("::1", 80))
    assert [row.inode for row in parse_table(TABLE, {TcpState.ESTABLISHED})] == [12]


@pytest.mark.parametrize(
    ("look", "nothing", "until"), [("num_unread", 0, until_read), ("unsent", frozenset(), until_sent)]
)
def test_a_look_at_the_tables_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, look: str, nothing: object, until: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """On a host with ten thousands of sockets it takes long; a stage that is silent meanwhile would be lost."""
    loop_runs = threading.Event()

    def looks(*_: object) -> object:
        assert loop_runs.wait(10.0), "the loop stands still meanwhile"
        return nothing

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(until())
            await asyncio.sleep(0)
            loop_runs.set()

    monkeypatch.setattr(sockets, look, looks)
    asyncio.run(run())


def test_own_connections_are_in_the_table() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as there:
        connection = (there.getsockname(), there.getpeername())
        assert [row.state for row in host_sockets(set(TcpState)) if row.connection == connection] == [
            TcpState.ESTABLISHED
        ]
        accepted, _ = server.accept()
        with accepted:
            assert num_unread() == 0


def test_what_a_reaped_process_had_sent_is_waited_for_to_the_last_byte() -> None:
    """Its socket holds more than the far end takes: bytes come after its death, until all are read."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            writer = start_sender(port)
            try:
                own, _ = server.accept()
                with own:
                    assert writer.stdin is not None
                    assert writer.stdout is not None
                    writer.stdin.write(b"\n")
                    writer.stdin.flush()
                    assert writer.stdout.readline() == b"full\n"
                    assert num_unread() == 0
                    os.kill(writer.pid, signal.SIGKILL)
                    writer.wait()
                    assert any(remote == own.getsockname() for _, remote in unsent())
                    assert num_unread() == 1
                    sent, read = asyncio.ensure_future(until_sent()), asyncio.ensure_future(until_read())
                    await asyncio.sleep(0)
                    own.setblocking(True)
                    num_bytes = 0
                    while data := await asyncio.to_thread(own.recv, 1 << 20):
                        assert not read.done()
                        num_bytes += len(data)
                    async with asyncio.timeout(30):
                        await sent
                        assert num_unread() == 1  # read to its end, and still open: who reads may not be through
                        assert not read.done()
                        own.close()
                        await read
                    assert num_bytes > 1 << 16
            finally:
                writer.kill()
                writer.wait()
                for pipe in (writer.stdin, writer.stdout):
                    assert pipe is not None
                    pipe.close()

    asyncio.run(run())


@pytest.mark.parametrize("linger", [False, True])
def test_a_connection_that_was_reset_can_still_be_read(linger: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {server.getsockname()[1]}
        with socket.create_connection(server.getsockname()) as there:
            own, _ = server.accept()
            with own:
                there.sendall(b"some bytes")
                if linger:
                    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                there.close()
                assert (num_unread(), num_unread(ports)) == (1, 1)
        assert num_unread() == 0


@pytest.mark.parametrize("linger", [False, True])
def test_a_connection_of_ours_to_a_peer_that_is_gone_brings_nothing_to_our_listeners(linger: bool) -> None:
    """A pool keeps it for minutes: who waited for its end would wait as long."""

    async def run() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as ours,
            socket.create_server(("127.0.0.1", 0)) as theirs,
            socket.create_connection(theirs.getsockname()),
        ):
            far, _ = theirs.accept()
            with far:
                far.sendall(b"acknowledged")
                if linger:
                    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            assert num_unread() == 1
            async with asyncio.timeout(30):
                await until_read({ours.getsockname()[1]})

    asyncio.run(run())


def test_what_waits_to_be_accepted_may_bring_what_a_process_had_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {listener.getsockname()[1]}
        assert num_unread(ports) == 0
        with socket.create_connection(listener.getsockname()) as sender:
            sender.sendall(b"x")
            assert num_unread(ports) == 1
            accepted, _ = listener.accept()
            with accepted:
                assert num_unread(ports) == 0
