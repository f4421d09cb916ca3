"""Programs that a process with busy connections starts: none of them crashes before it has begun."""

from __future__ import annotations

import os
import subprocess
import sys

STARTS = 200
SCRIPT = f"""
import asyncio, sys, uvloop
from stagemesh.shared.rpc.broker import BROKER
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.server import Server
from tests.support.rpc_bench import FakeBroker, quick_fill

async def call(client):
    while True:
        await quick_fill(client)

async def main():
    server = Server({{BROKER: FakeBroker()}})
    async with Client(await server.start("unix:" + sys.argv[1]), BROKER) as client:
        calling = asyncio.create_task(call(client))
        ends = [await (await asyncio.create_subprocess_exec("true")).wait() for _ in range({STARTS})]
        calling.cancel()
    await server.stop()
    print(sum(1 for status in ends if status))

uvloop.run(main())
"""


def test_no_program_that_is_started_beside_calls_crashes(tmp_path: object) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{tmp_path}/s"], env=environ, capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "0"), ran.stderr
