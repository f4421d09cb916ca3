"""Services that only start, say so and stop, in the ways a test asks for; what they do is appended to a journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from stagemesh.shared.config import Config
from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime.notify import Notifier

BEHAVIOUR = "STAGEMESH_FAKE_"
"""Prefix of the variables that say how a process behaves, by its name: `STAGEMESH_FAKE_decode-0/1=crash`."""


OPENAI_PORT = 23456
LONG_S, PULSE_S = 3.0, 0.1  # of a long start


def run(config: Config, instance: str | None, pp_rank: int | None) -> None:
    name = f"{instance}/{pp_rank}" if instance else os.environ["STAGEMESH_FAKE_SERVICE"]
    address = "127.0.0.1:12345" if name == "router" else None
    Fake(name, Path(config.mesh.run_dir).with_suffix(".journal"), address=address).run()


def run_router(config: Config, instance: str | None, pp_rank: int | None) -> None:
    os.environ["STAGEMESH_FAKE_SERVICE"] = "router"
    run(config, instance, pp_rank)


def run_broker(config: Config, instance: str | None, pp_rank: int | None) -> None:
    os.environ["STAGEMESH_FAKE_SERVICE"] = "broker"
    run(config, instance, pp_rank)


def reaped(config: Config, instance: str | None, epoch: int | None) -> None:
    """Refuses, which is how it is seen."""
    raise Rejected("reaped", f"{instance} of epoch {epoch}")


EPOCH = 3


def run_openai(config: Config, instance: str | None, pp_rank: int | None) -> None:
    os.environ["STAGEMESH_FAKE_SERVICE"] = "openai"
    assert config.openai.port is not None
    port = config.openai.port or OPENAI_PORT
    Path(config.mesh.run_dir).with_suffix(".openai").write_text(f"{port} in front of {config.router.listen}")
    Fake("openai", Path(config.mesh.run_dir).with_suffix(".journal"), address=f"127.0.0.1:{port}").run()


ENTRIES = {
    "openai": f"{__name__}:run_openai",
    "router": f"{__name__}:run_router",
    "broker": f"{__name__}:run_broker",
    "prefill": f"{__name__}:run",
    "decode": f"{__name__}:run",
}


def spin() -> None:
    while True:
        pass


class Fake:
    """SIGUSR1 makes it hang, SIGUSR2 spin."""

    def __init__(self, name: str, journal: Path, *, address: str | None) -> None:
        self._address = address
        self._name = name
        self._journal = journal
        self._behaviour = os.environ.get(BEHAVIOUR + name, "")

    def run(self) -> None:
        stops = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        signal.signal(signal.SIGUSR1, lambda *_: self._hang())
        signal.signal(signal.SIGUSR2, lambda *_: spin())
        notifier = Notifier.from_environ(os.environ)
        notifier.status("loading")
        print(f"{self._name} was started")
        self._before_ready(notifier)
        if "/" in self._name:
            notifier.epoch(EPOCH)
        notifier.ready(self._address)
        assert notifier.watchdog_timeout_s is not None
        while True:
            notifier.watchdog()
            told = signal.sigtimedwait(stops, notifier.watchdog_timeout_s / 4)
            if told is None:
                continue
            if told.si_signo == signal.SIGHUP:  # as if it had a reason of its own
                notifier.again("for a reason")
            notifier.stopping()
            self._note("told to stop")
            if self._behaviour != "stay":
                break
        notifier.close()
        self._note("stopped")
        if self._behaviour == "cut off":
            sys.exit(1)

    def _before_ready(self, notifier: Notifier) -> None:
        match self._behaviour:
            case "crash":
                raise RuntimeError("no such luck")
            case "refuse":
                raise Rejected("memory", "needs 2 GiB, has 1 GiB")
            case "hang":
                self._hang()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "wait" | "work":
                self._take_long(notifier)
            case "hang again" if self._start() == 2:
                self._hang()
            case "spin again" if self._start() == 2:
                spin()
            case "child":
                left_behind = subprocess.Popen(["sleep", "600"])
                print(f"left behind: {left_behind.pid}.")

    def _hang(self) -> None:
        signal.sigwait({signal.SIGTERM})
        sys.exit(0)

    def _take_long(self, notifier: Notifier) -> None:
        """Says that it waits, or does something without a word."""
        end_s = time.monotonic() + LONG_S
        while time.monotonic() < end_s:
            if self._behaviour == "wait":
                notifier.watchdog()
                signal.sigtimedwait({signal.SIGTERM}, PULSE_S)

    def _start(self) -> int:
        """How often it was started, with this time."""
        self._note("starts")
        return self._journal.read_text().splitlines().count(f"{self._name} starts")

    def _note(self, what: str) -> None:
        with self._journal.open("a") as journal:
            journal.write(f"{self._name} {what}\n")
