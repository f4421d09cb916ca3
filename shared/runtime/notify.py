"""The service's side of the sd_notify protocol: datagrams of `NAME=value` lines to $NOTIFY_SOCKET.

STATUS=... -> X_METRICS=, where its metrics are -> X_EPOCH=, of a stage -> READY=1 (and X_ADDRESS=, where the service
really listens) -> WATCHDOG=1 ... -> X_AGAIN=, of one that ends by itself to be started again -> STOPPING=1

Under systemd and under `stagemesh up` alike. Without $NOTIFY_SOCKET every call does nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

ADDRESS: Final = "X_ADDRESS"
METRICS: Final = "X_METRICS"
EPOCH: Final = "X_EPOCH"
AGAIN: Final = "X_AGAIN"
CUT_OFF: Final = "cut off"
PATIENCE_S: Final = 2.0


class Notifier:
    """Never raises: a supervisor that does not listen must not stop a service. What is lost is counted.

    A unix socket holds ten datagrams or so. What must not be lost (all but the status and the watchdog) waits up to
    PATIENCE_S for room; the rest does not wait.
    """

    def __init__(self, path: str | None, watchdog_timeout_s: float | None = None) -> None:
        self.watchdog_timeout_s = watchdog_timeout_s
        self.num_lost = 0
        # a leading @ stands for the NUL byte of Linux's abstract namespace
        self._target = "\0" + path[1:] if path and path.startswith("@") else path
        self._socket: socket.socket | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """As systemd sets it: NOTIFY_SOCKET, and WATCHDOG_USEC if WATCHDOG_PID is ours or absent."""
        timeout_us = environ.get("WATCHDOG_USEC", "")
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        timeout_s = int(timeout_us) / 1e6 if timeout_us.isdecimal() and ours else None
        return cls(environ.get("NOTIFY_SOCKET"), timeout_s)

    def ready(self, address: str | None = None) -> None:
        """The service takes work now. `address` is where, if that was not known from the config (port 0)."""
        self._send("READY=1", "STATUS=serving", *([f"{ADDRESS}={address}"] if address else []), patience_s=PATIENCE_S)

    def metrics(self, address: str) -> None:
        """`address` is where the metrics can be read."""
        self._send(f"{METRICS}={address}", patience_s=PATIENCE_S)

    def epoch(self, epoch: int) -> None:
        """`epoch` is that of the instance whose stage this is."""
        self._send(f"{EPOCH}={epoch}", patience_s=PATIENCE_S)

    def status(self, text: str) -> None:
        """One line on what the service is doing, for people."""
        self._send(f"STATUS={text.replace(chr(10), ' ')}")

    def again(self, why: str) -> None:
        """The service is about to drain and end by itself, with all that are started with it: to be started again."""
        self._send(f"{AGAIN}={why.replace(chr(10), ' ')}", patience_s=PATIENCE_S)

    def stopping(self, timeout_s: float | None = None) -> None:
        """The service drains now, and wants `timeout_s` for it and its end, if its supervisor had less in mind."""
        extend = [] if timeout_s is None else [f"EXTEND_TIMEOUT_USEC={round(timeout_s * 1e6)}"]
        self._send("STOPPING=1", "STATUS=draining", *extend, patience_s=PATIENCE_S)

    def cut_off(self, what: str) -> None:
        """The time to drain was not enough for `what`."""
        self._send(f"STATUS={CUT_OFF}: {what}", patience_s=PATIENCE_S)

    def watchdog(self) -> None:
        """Says that work makes progress; to be called more often than `watchdog_timeout_s`."""
        self._send("WATCHDOG=1")

    def trigger(self) -> None:
        """Says that work makes no progress any more: to be killed at once, without waiting for the timeout."""
        self._send("WATCHDOG=trigger", patience_s=PATIENCE_S)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str, patience_s: float = 0.0) -> None:
        if self._target is None:
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.connect(self._target)  # only a connected one can be waited for
            self._socket.settimeout(patience_s)
            self._socket.send("\n".join(lines).encode())
        except (BlockingIOError, TimeoutError):
            self.num_lost += 1
        except OSError:
            self.num_lost += 1
            self.close()
