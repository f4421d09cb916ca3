"""A process that others write to: it registers memory, prints the key, then answers questions about its bytes.

python transfer_target.py BACKEND NUM_BYTES
-> endpoint address length
"digest OFFSET LENGTH" -> sha256, "only OFFSET LENGTH" -> the byte that all of it is, or -1,
"count" -> bytes that are not 0, "clear" -> ok, "revoke" -> ok, "read_out" -> ok, end of input -> exit
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys

import torch

from stagemesh.shared.transfer.base import Endpoint, RegionKey
from stagemesh.shared.transfer.capabilities import KNOWN, Capabilities
from stagemesh.shared.transfer.mooncake import MooncakeEndpoint, MooncakeSettings
from stagemesh.shared.transfer.nixl import NixlEndpoint, NixlSettings

BETWEEN_PROCESSES = ("mooncake", "nixl", "nixl-tcp")  # `nixl-tcp` is what `nixl` does between hosts
PROTOCOLS = {"memory": "auto", "mooncake": "tcp", "nixl": "intranode", "nixl-tcp": "tcp"}
MIB = 1 << 20


def open_backend(backend: str, max_batch_bytes: int = 4 * MIB) -> Endpoint:
    """One of BETWEEN_PROCESSES."""
    if backend == "mooncake":
        return MooncakeEndpoint(MooncakeSettings(max_batch_bytes=max_batch_bytes))
    return NixlEndpoint(NixlSettings(protocol=PROTOCOLS[backend], max_batch_bytes=max_batch_bytes))


def capabilities(backend: str) -> Capabilities:
    return KNOWN[backend.partition("-")[0], "cpu", PROTOCOLS[backend]]


def digest(memory: torch.Tensor, offset: int, length: int) -> str:
    return hashlib.sha256(memory[offset : offset + length].numpy().tobytes()).hexdigest()


class TargetProcess:
    """That process, seen from the test."""

    def __init__(self, num_bytes: int, backend: str = "mooncake") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, backend, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        endpoint, address, length = self._read().split()
        self.key = RegionKey(endpoint, int(address), int(length))

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the target process ended with {self.process.wait()}"
        return line.strip()

    def ask(self, question: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._read()

    def digest(self, offset: int, length: int) -> str:
        return self.ask(f"digest {offset} {length}")

    def count(self) -> int:
        return int(self.ask("count"))

    def only(self, offset: int, length: int) -> int:
        """The byte that the whole range consists of; -1 if there are several."""
        return int(self.ask(f"only {offset} {length}"))

    def clear(self) -> None:
        assert self.ask("clear") == "ok"

    def revoke(self) -> None:
        """Ends the registration."""
        assert self.ask("revoke") == "ok"

    def read_out(self) -> None:
        assert self.ask("read_out") == "ok"

    def stop(self) -> None:
        """Stops every thread of the process, and returns once they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        """Ends the process, however it is doing, and reaps it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    torch.set_num_threads(1)
    memory = torch.zeros(int(sys.argv[2]), dtype=torch.uint8)
    endpoint = open_backend(sys.argv[1])
    region = endpoint.register(memory)
    key = endpoint.publish(region)
    print(key.endpoint, key.address, key.length, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["digest", offset, length]:
                print(digest(memory, int(offset), int(length)), flush=True)
            case ["only", offset, length]:
                part = memory[int(offset) : int(offset) + int(length)]
                print(int(part[0]) if bool((part == part[0]).all()) else -1, flush=True)
            case ["count"]:
                print(int(torch.count_nonzero(memory)), flush=True)
            case ["read_out"]:
                asyncio.run(endpoint.read_out())
                print("ok", flush=True)
            case ["clear"]:
                memory.zero_()
                print("ok", flush=True)
            case ["revoke"]:
                endpoint.unregister(region)
                print("ok", flush=True)


if __name__ == "__main__":
    main()
