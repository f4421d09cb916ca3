"""A whole mesh in processes of its own: started, asked, checked, stopped, and gone at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stagemesh.shared.errors import PeerLost, Retryable
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.rpc.inspect import INSPECT
from tests.support.mesh import ROOT, wait_gone

START_LIMIT_S = 300.0
STOP_LIMIT_S = 90.0
SETTLE_LIMIT_S = 60.0
CALL_LIMIT_S = 10.0


class RunningMesh:
    """Ready to serve. `output` is what it has said on stderr so far."""

    def __init__(
        self, process: subprocess.Popen[str], ready_file: Path, router_dial: Dial = PLAIN, peer_dial: Dial = PLAIN
    ) -> None:
        self.process = process
        self._router_dial, self._peer_dial = router_dial, peer_dial
        self.output: list[str] = []
        self.record: dict[str, Any] = {}
        self.exit_code = 0  # that `stop` wants
        self._ready_file = ready_file
        self._said = threading.Event()
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.output.append(line)
                self._heard.notify_all()
            if line.startswith("stagemesh serves"):
                self._said.set()
        self._said.set()

    def wait_ready(self) -> None:
        assert self._said.wait(START_LIMIT_S), self.said
        assert self._ready_file.exists(), self.said
        self.record = self.read_record()

    @property
    def said(self) -> str:
        return "".join(self.output[-80:])

    @property
    def router(self) -> str:
        return str(self.record["router"])

    @property
    def pids(self) -> dict[str, int]:
        return {process["name"]: process["pid"] for process in self.record["processes"]}

    async def peers(self) -> dict[str, str]:
        async with Client(self.router, INSPECT, dial=self._router_dial) as client:
            reply = await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=10)
        return {peer.name: peer.address for peer in reply.peers}

    def _dial_of(self, name: str) -> Dial:
        return self._router_dial if name == "router" else self._peer_dial

    async def check(self) -> dict[str, inspect_pb2.CheckReply]:
        """Every process's own word on its invariants. Fails where one does not hold."""
        replies = {}
        for name, address in (await self.peers()).items():
            async with Client(address, INSPECT, dial=self._dial_of(name)) as client:
                replies[name] = await client.call("Check", inspect_pb2.CheckRequest(), timeout_s=10)
        assert all(reply.ok for reply in replies.values()), {n: r.violation for n, r in replies.items() if not r.ok}
        return replies

    async def check_idle(self, *, but: frozenset[str] = frozenset()) -> dict[str, dict[str, int]]:
        """Nothing is in flight anywhere: at once, or when what is on its way has come home. What is named `but` may be
        held, and is returned."""
        held: dict[str, dict[str, int]] = {}
        try:
            async with asyncio.timeout(SETTLE_LIMIT_S):
                while True:  # each round asks every process, which takes its time: no wait of our own
                    held = {n: {k: v for k, v in r.held.items() if v} for n, r in (await self.check()).items()}
                    if not {what for each in held.values() for what in each} - but:
                        return {name: each for name, each in held.items() if each}
        except TimeoutError:
            raise AssertionError(f"still held: {held}") from None

    def read_record(self) -> dict[str, Any]:
        """The ready file as it is now: what was started again has another pid."""
        self.record = json.loads(self._ready_file.read_text())
        return self.record

    def num_starts(self, group: str) -> int:
        """How often it has been started and was ready."""
        with self._heard:
            return 1 + sum(line.startswith(f"stagemesh: {group} is back") for line in self.output)

    async def until_back(self, group: str, start: int = 2) -> None:
        """Returns when an instance, the router or the bus has been started for that time, and is ready."""
        await asyncio.to_thread(self.until_said, f"stagemesh: {group} is back, start {start}\n")
        self.read_record()

    def num_said(self, text: str) -> int:
        """How many lines with that text it has said."""
        with self._heard:
            return sum(text in line for line in self.output)

    def until_said(self, text: str, times: int = 1) -> str:
        """The line with that text that it says, or has said, for the `times`th time."""

        def found() -> list[str]:
            return [line for line in self.output if text in line]

        with self._heard:
            assert self._heard.wait_for(lambda: len(found()) >= times, START_LIMIT_S), self.said
            return found()[times - 1]

    async def until_instances(self, count: int) -> None:
        """Returns when the router can talk to so many. Each round asks it, which takes its time: no wait of our own."""
        async with asyncio.timeout(START_LIMIT_S), Client(self.router, INSPECT, dial=self._router_dial) as client:
            while (await self._gauges(client)).get("instances") != count:
                assert self.process.poll() is None, self.said

    async def _gauges(self, client: Client) -> Mapping[str, int]:
        """Empty while the router is away."""
        try:
            reply = await client.call("Check", inspect_pb2.CheckRequest(), timeout_s=CALL_LIMIT_S)
        except (Retryable, PeerLost):
            return {}
        gauges: Mapping[str, int] = reply.gauges
        return gauges

    async def spans(self) -> list[dict[str, Any]]:
        spans = []
        for name, address in (await self.peers()).items():
            async with Client(address, INSPECT, dial=self._dial_of(name)) as client:
                reply = await client.call("Trace", inspect_pb2.TraceRequest(), timeout_s=10)
            spans += json.loads(reply.spans)
        return spans

    def stop(self) -> None:
        """Drains it. Fails unless it ends well and leaves no process."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_LIMIT_S)
        self._reader.join()
        assert code == self.exit_code, self.said
        wait_gone(list(self.pids.values()))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def running_mesh(
    tmp_path: Path,
    *options: str,
    environ: Mapping[str, str] | None = None,
    module: str = "stagemesh.shared.cli.main",
    router_dial: Dial = PLAIN,
    peer_dial: Dial = PLAIN,
) -> Iterator[RunningMesh]:
    """`stagemesh up` with `options`, ready at the start of the block and stopped at its end; `module` runs it."""
    ready_file = tmp_path / "ready.json"
    command = ["-m", module, "up", "--port", "0", "--ready-file", str(ready_file), *options]
    # but for the mark by which what is left behind would be found
    kept = {"STAGEMESH_TEST_MARK"}
    inherited = {k: v for k, v in os.environ.items() if k in kept or not k.startswith("STAGEMESH_")}
    inherited.pop("GRPC_VERBOSITY", None)  # this process has set it for itself
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": os.pathsep.join([str(ROOT / ".ns"), *known]), **(environ or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    mesh = RunningMesh(process, ready_file, router_dial, peer_dial)
    try:
        mesh.wait_ready()
        yield mesh
        mesh.stop()
    finally:
        mesh.kill()
