"""`stagemesh openai`: the gateway's process as a service of the mesh.

start --it can tokenize: it has the router's tokenizer--> serving --SIGTERM, passed on--> lets requests end --> over
                                                             `--it ends by itself, or answers nobody: PeerLost
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from stagemesh.shared.config import Config
from stagemesh.shared.config.hosts import LOOPBACK
from stagemesh.shared.errors import PeerLost
from stagemesh.shared.obs.log import Log, choose_form, configure
from stagemesh.shared.runtime import smg_process
from stagemesh.shared.runtime.foreign import end_stopped
from stagemesh.shared.runtime.gateway_plan import GatewayPlace, gateway_arguments, gateway_place
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.preflight import check_gateway
from stagemesh.shared.runtime.service import Child, run_to_end

ANSWER_TIMEOUT_S: Final = 2.0
POLL_S: Final = 0.1  # while it starts
PROBE_INTERVAL_S: Final = 5.0
MAX_SILENCE: Final = 3  # probes without an answer
ITS_END_S: Final = 1.0  # once no request is in flight
STOP_TIMEOUT_S: Final = 3.0  # when it has had its time
LOGGED: Final = {"message": "said", "error": "reason", "status": "status", "request_id": "request_id", "target": "part"}
OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}  # the router has the tokenizer: nothing is looked for elsewhere


class GatewayService:
    """A `Service` around the gateway's process."""

    def __init__(
        self,
        config: Config,
        place: GatewayPlace,
        notifier: Notifier,
        log: Log,
        *,
        interval_s: float = PROBE_INTERVAL_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._config, self._place, self._notifier, self._log = config, place, notifier, log
        self._interval_s, self._answer_timeout_s = interval_s, answer_timeout_s
        self._process: Process | None = None
        self._is_stopping = False

    @property
    def address(self) -> str | None:
        return self._place.address

    async def start(self, stack: AsyncExitStack) -> list[Child]:
        self._notifier.status("starting the gateway")
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", smg_process.__name__, str(os.getpid()), *gateway_arguments(self._config, self._place)),
            env={**os.environ, **OFFLINE},
            stdin=DEVNULL,
            stdout=PIPE,
        )
        stack.push_async_callback(_end, process)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        following = group.create_task(self._follow(process))
        stack.callback(following.cancel)
        self._notifier.status(f"waiting for the router at {self._place.router}")
        while True:
            if await self._has_tokenizer():
                break
            await asyncio.sleep(POLL_S)
        self._notifier.metrics(self._place.metrics)
        self._log.info("gateway is up", address=self._place.address, metrics_address=self._place.metrics)
        return [self._probe(process), end_stopped(process, "the gateway")]

    async def withdraw(self) -> None:
        """It takes no more connections, and lets those that it has end."""
        self._is_stopping = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    async def idle(self) -> None:
        if self._process is not None:
            await self._process.wait()

    @property
    def held(self) -> Mapping[str, int]:
        """What it has in flight is the router's too, which counts it."""
        return {}

    async def _has_tokenizer(self) -> bool:
        body = json.dumps({"model": self._place.model, "prompt": "a"})
        return await http_status(self._place.port, "POST", "/v1/tokenize", body, self._answer_timeout_s) == 200

    async def _follow(self, process: Process) -> None:
        """Its log is part of ours, until it ends."""
        assert process.stdout is not None
        while line := await _read_line(process.stdout):
            if (said := log_record(line)) is not None:
                self._log.error("the gateway reports an error", **said)
        code = await process.wait()
        if not self._is_stopping:
            raise PeerLost(f"the gateway ended with {code}")

    async def _probe(self, process: Process) -> None:
        """Kills a gateway that answers nobody, and raises PeerLost."""
        silent = 0
        while silent < MAX_SILENCE:
            await asyncio.sleep(self._interval_s)
            status = await http_status(self._place.port, "GET", "/liveness", "", self._answer_timeout_s)
            silent = silent + 1 if status is None and not self._is_stopping else 0
        with suppress(ProcessLookupError):
            process.kill()  # it would not hear a milder word
        raise PeerLost(f"the gateway has not answered {MAX_SILENCE} times")


async def http_status(port: int, method: str, path: str, body: str, timeout_s: float) -> int | None:
    """What a server on this host answers; None for one that does not, in time."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            try:
                writer.write(request.encode())
                version, status, *_ = (await reader.readline()).split(maxsplit=2)
                return int(status) if version.startswith(b"HTTP/") else None
            finally:
                writer.close()
    except (OSError, ValueError):  # a TimeoutError is an OSError; what is not HTTP is a ValueError
        return None


def log_record(line: bytes) -> dict[str, Any] | None:
    """What a line of its log says; None for one of its banner."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return {LOGGED[name]: value for name, value in said.items() if name in LOGGED} if isinstance(said, dict) else None


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """A line, or a part of one that is too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def run(config: Config, instance: str | None = None, pp_rank: int | None = None) -> None:
    """Runs the gateway of the deployment until told to stop."""
    check_gateway(config)
    place = gateway_place(config)
    log = configure("openai", form=choose_form(os.environ, sys.stderr))
    notifier = Notifier.from_environ(os.environ)
    service = GatewayService(config, place, notifier, log)
    drain_timeout_s = config.engine.drain_timeout_s + ITS_END_S
    run_to_end(service, drain_timeout_s=drain_timeout_s, notifier=notifier, log=log)
