"""Commands against servers that refuse them, or end half way: what is said, and how soon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.errors import Retryable
from stagemesh.shared.pb import generator_pb2, inspect_pb2
from stagemesh.shared.rpc.guard import Listening
from stagemesh.shared.rpc.inspect import INSPECT
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.security.material import Material
from tests.support.certificates import Authority, write_files
from tests.support.mesh import ROOT
from tests.unit.test_rpc_tls import GENERATOR, LOG, Echo

LIMIT_S = 60.0


class Peers:
    """A router that knows one other process."""

    def __init__(self, name: str, address: str) -> None:
        self._peer = inspect_pb2.Peer(name=name, address=address)

    async def Peers(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inspect_pb2.PeersReply(peers=[self._peer])

    def __getattr__(self, method: str) -> Any:
        return self.Peers  # nothing else is asked here


class HalfAnAnswer(Echo):
    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield generator_pb2.GenerateResponse(text="The capital")
        raise Retryable("decode-0 is lost")


async def stagemesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagemesh.shared.cli.main", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".ns")}
    return await asyncio.to_thread(
        subprocess.run, command, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


async def serve(stack: AsyncExitStack, services: dict[Any, Any], listening: Listening | None = None) -> str:
    server = Server(services, listening or Listening())
    address = await server.start("127.0.0.1:0")
    stack.push_async_callback(server.stop)
    return address


@pytest.mark.parametrize("command", [["check"], ["trace"], ["profile", "decode-0"], ["drain", "decode-0"], ["dump"]])
def test_a_process_that_wants_a_certificate_of_the_mesh_is_said_to(tmp_path: Path, command: list[str]) -> None:
    authority = Authority("mesh")
    material = Material(write_files(tmp_path, authority.issue("mesh"), authority.pem, "mesh"), LOG)

    async def run() -> subprocess.CompletedProcess[str]:
        async with AsyncExitStack() as stack:
            inner = await serve(stack, {GENERATOR: Echo()}, Listening(material, clients=True))
            router = await serve(stack, {INSPECT: Peers("decode-0/0", inner)}, Listening(material))
            return await stagemesh("--ca-file", str(tmp_path / "mesh-ca.pem"), *command, "--router", router)

    done = asyncio.run(run())
    assert "it may want TLS, or a certificate that it trusts" in done.stdout + done.stderr
    assert "Deadline" not in done.stdout + done.stderr


def test_an_error_after_some_text_stands_in_a_line_of_its_own() -> None:
    async def run() -> subprocess.CompletedProcess[str]:
        async with AsyncExitStack() as stack:
            router = await serve(stack, {GENERATOR: HalfAnAnswer()})
            return await stagemesh("generate", "--router", router, "What is the capital of France?")

    done = asyncio.run(run())
    assert (done.returncode, done.stdout) == (2, "The capital\n")
    assert done.stderr.startswith("error: ")
    assert "decode-0 is lost" in done.stderr
