"""The service's side of sd_notify against the supervisor's, and against sockets that are not there."""

from __future__ import annotations

import os
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.notify_socket import NotifySocket


def test_lines_arrive_with_the_senders_pid_and_in_order(tmp_path: Path) -> None:
    listener = NotifySocket(tmp_path / "notify.sock")
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": str(listener.path)})
    notifier.status("loading\nlayer 3")
    notifier.ready("127.0.0.1:8470")
    notifier.watchdog()
    notifier.again("a\nreason")
    notifier.stopping()
    notifier.stopping(2.5)
    received = [listener.receive() for _ in range(7)]
    assert received == [
        (os.getpid(), {"STATUS": "loading layer 3"}),
        (os.getpid(), {"READY": "1", "STATUS": "serving", "X_ADDRESS": "127.0.0.1:8470"}),
        (os.getpid(), {"WATCHDOG": "1"}),
        (os.getpid(), {"X_AGAIN": "a reason"}),
        (os.getpid(), {"STOPPING": "1", "STATUS": "draining"}),
        (os.getpid(), {"STOPPING": "1", "STATUS": "draining", "EXTEND_TIMEOUT_USEC": "2500000"}),
        None,
    ]
    assert notifier.num_lost == 0
    notifier.close()
    listener.close()
    assert not listener.path.exists()


def test_an_at_sign_means_the_abstract_namespace() -> None:
    name = f"stagemesh-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        notifier = Notifier(f"@{name}")
        notifier.ready()
        assert listener.recv(100) == b"READY=1\nSTATUS=serving"
        notifier.close()


def test_without_a_socket_nothing_happens() -> None:
    notifier = Notifier.from_environ({})
    notifier.ready("127.0.0.1:1")
    notifier.close()
    assert notifier.num_lost == 0


def test_a_listener_that_is_gone_costs_only_the_message(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "notify.sock"))
    notifier.ready()
    assert notifier.num_lost == 1
    listener = NotifySocket(tmp_path / "notify.sock")
    notifier.ready()
    assert listener.receive() == (os.getpid(), {"READY": "1", "STATUS": "serving"})
    listener.close()
    notifier.ready()
    assert notifier.num_lost == 2
    notifier.close()


def test_with_a_listener_that_does_not_read_the_status_is_lost_but_ready_waits(tmp_path: Path) -> None:
    listener = NotifySocket(tmp_path / "notify.sock")
    notifier = Notifier(str(listener.path))
    while not notifier.num_lost:  # the kernel's queue is bounded, and the call comes back
        notifier.status("x" * 1000)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(notifier.ready)
        received: list[dict[str, str]] = []
        while {"READY": "1", "STATUS": "serving"} not in received:
            select.select([listener], [], [], 30.0)
            received += [lines for _, lines in iter(listener.receive, None)]
        sent.result()
    assert notifier.num_lost == 1
    notifier.close()
    listener.close()


@pytest.mark.parametrize(
    ("environ", "timeout_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_ours_only_if_it_names_us(environ: dict[str, str], timeout_s: float | None) -> None:
    assert Notifier.from_environ(environ).watchdog_timeout_s == timeout_s
