"""`stagemesh nats`: a NATS server under an init system, with what the server itself does not tell one.

start --its log says ready--> serving --SIGTERM, passed on--> ended
                                 `--it ends by itself, or greets nobody any more: PeerLost
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from stagemesh.shared.config import Config
from stagemesh.shared.errors import PeerLost, Rejected
from stagemesh.shared.obs.log import choose_form, configure
from stagemesh.shared.runtime.foreign import end_stopped
from stagemesh.shared.runtime.nats_server import find_nats_server, says_ready
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.service import Child, run_to_end

ANSWER_TIMEOUT_S: Final = 2.0
PROBE_INTERVAL_S: Final = 5.0  # a probe costs a connection
MAX_SILENCE: Final = 3  # probes without an answer; one may be lost on a busy host
STOP_TIMEOUT_S: Final = 10.0  # it writes its store to the disk
DEFAULT_PORT: Final = 4222


@dataclass(frozen=True, slots=True)
class NatsPlace:
    """Where the server listens, and the JetStream store; `server_config` is a file of the server's own, or None."""

    host: str
    port: int
    name: str
    store_dir: Path
    server_config: Path | None = None

    @property
    def arguments(self) -> Sequence[str]:
        own = [] if self.server_config is None else ["-c", str(self.server_config)]
        return [*own, "-a", self.host, "-p", str(self.port), "-n", self.name, "-js", "-sd", str(self.store_dir)]


def nats_place(config: Config, store_dir: Path | None, server_config: Path | None) -> NatsPlace:
    """Raises Rejected if the config names no server."""
    if not config.nats.url:
        raise Rejected("nats.url", "is empty; only under `stagemesh up` is the server's address its own choice")
    url = urlsplit(config.nats.url)
    if not url.hostname:
        raise Rejected("nats.url", f"names no host: {config.nats.url!r}")
    store = store_dir or Path(config.mesh.run_dir) / "nats"
    host = config.mesh.listen_host or url.hostname
    return NatsPlace(host, url.port or DEFAULT_PORT, f"stagemesh-{config.mesh.name}", store, server_config)


class NatsService:
    """A `Service` around the server's process."""

    def __init__(
        self,
        place: NatsPlace,
        notifier: Notifier,
        *,
        interval_s: float = PROBE_INTERVAL_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._place, self._notifier = place, notifier
        self._interval_s, self._answer_timeout_s = interval_s, answer_timeout_s

    @property
    def address(self) -> str | None:
        return None

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        self._notifier.status("starting the NATS server")
        program = find_nats_server()
        process = await asyncio.create_subprocess_exec(
            program, *self._place.arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )
        stack.push_async_callback(_end, process)
        assert process.stderr is not None
        while data := await process.stderr.readline():
            print(line := data.decode(errors="replace").rstrip("\n"), file=sys.stderr)
            if says_ready(line):
                break
        else:
            raise PeerLost(f"the NATS server ended with {await process.wait()}; its log says why")
        return [self._follow(process), self._probe(process), end_stopped(process, "the NATS server")]

    async def withdraw(self) -> None:
        """Clients reconnect by themselves, and the data path does without."""

    async def idle(self) -> None:
        """Nothing of ours is in flight."""

    @property
    def held(self) -> Mapping[str, int]:
        return {}

    async def _follow(self, process: Process) -> None:
        """Its log is ours, until it ends."""
        assert process.stderr is not None
        async for line in process.stderr:
            print(line.decode(errors="replace"), end="", file=sys.stderr)
        raise PeerLost(f"the NATS server ended with {await process.wait()}")

    async def _probe(self, process: Process) -> None:
        """Kills a server that hangs, whose clients are connected and hear nothing, and raises PeerLost."""
        silent = 0
        while silent < MAX_SILENCE:
            await asyncio.sleep(self._interval_s)
            greeted = await answers(self._place.host, self._place.port, self._answer_timeout_s)
            silent = 0 if greeted else silent + 1
        with suppress(ProcessLookupError):
            process.kill()  # it would not hear a milder word
        raise PeerLost(f"the NATS server has not greeted {MAX_SILENCE} connections")


async def answers(host: str, port: int, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """True if a NATS server greets a new connection: it needs no account for that."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return (await reader.readline()).startswith(b"INFO ")
            finally:
                writer.close()
    except (OSError, ValueError):  # a TimeoutError is an OSError; a line without an end is a ValueError
        return False


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def run(config: Config, store_dir: Path | None = None, server_config: Path | None = None) -> None:
    """Runs the NATS server of the deployment until told to stop."""
    place = nats_place(config, store_dir, server_config)
    log = configure("nats", form=choose_form(os.environ, sys.stderr))
    notifier = Notifier.from_environ(os.environ)
    run_to_end(NatsService(place, notifier), drain_timeout_s=STOP_TIMEOUT_S, notifier=notifier, log=log)
