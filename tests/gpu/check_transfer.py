"""KV from GPU to GPU through each transfer backend, between two processes: the bytes arrive, and how fast; and what a
writer sees when its target is killed.

    pytest -s tests/gpu/check_transfer.py     # or run it as a script, for the table alone

All processes start at once, then one pair after the other measures, so that the start is paid once. The processes:
python check_transfer.py target KIND -> the key; "BYTE LENGTH COUNT" -> bytes of the pieces that are BYTE
python check_transfer.py writer KIND KEY... -> "ready"; "LENGTH COUNT BYTE" -> seconds; "kill?" -> see `Writer`
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from stagemesh.shared.config import TransferSection
from stagemesh.shared.core.directory import RegionKey
from stagemesh.shared.obs.log import configure
from stagemesh.shared.transfer.backends import open_endpoint
from stagemesh.shared.transfer.base import Endpoint, Piece, Region, TransferHandle, TransferState

KIB, MIB = 1 << 10, 1 << 20
NUM_BYTES = 512 * MIB
SIZES = [(4 * KIB, 1), (512 * KIB, 1), (4 * MIB, 1), (64 * MIB, 1), (512 * MIB, 1), (32 * KIB, 4096), (64 * KIB, 1024)]
KINDS = [f"{backend} {protocol}" for backend in ("mooncake", "nixl") for protocol in ("intranode", "tcp")]
ROW_S = 0.5  # a size is repeated for about so long
NOTICED_WITHIN_S = 3.0
KILLED = "target killed, noticed"
MAY_GO_ON = {"mooncake intranode"}
"""Their writes go to memory of the target that stays mapped here after its death: in some runs none of them fails. A
mesh hears of the death on its links, and a write is worth nothing without the target's own word."""


def open_here(kind: str) -> Endpoint:
    backend, _, protocol = kind.partition(" ")
    section = TransferSection(backend=backend, protocol=protocol, host="127.0.0.1")  # type: ignore[arg-type]
    return open_endpoint(section, "cuda", configure("check", level=logging.ERROR))


def spread(length: int, count: int) -> int:
    """Bytes from one piece to the next: they are no neighbours, so that none is joined to another."""
    return length if count == 1 else 2 * length


# -- the target --


async def serve(kind: str) -> None:
    endpoint = open_here(kind)
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    key = endpoint.publish(endpoint.register(memory))
    print(key.endpoint, key.address, key.length, flush=True)
    while words := (await asyncio.to_thread(sys.stdin.readline)).split():
        byte, length, count = map(int, words)
        pieces = memory[: spread(length, count) * count].view(count, -1)[:, :length]
        print(int(torch.count_nonzero(pieces == byte)), flush=True)
    await endpoint.close()


# -- the writer --


class Writer:
    def __init__(self, kind: str, key: RegionKey) -> None:
        self._endpoint, self._key = open_here(kind), key
        self._memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self._region: Region = self._endpoint.register(self._memory)

    def write(self, length: int, count: int) -> TransferHandle:
        step = spread(length, count)
        pieces = [
            Piece(self._region.address + at, self._key.address + at, length) for at in range(0, step * count, step)
        ]
        return self._endpoint.write(self._key, pieces)

    async def measure(self, length: int, count: int, byte: int) -> float:
        """The median seconds of a write, from the call to the loop's turn that knows of its end. Only the last one
        writes `byte`, so that the target sees whether it was done."""
        self._fill(0)
        times: list[float] = []
        until = time.perf_counter() + ROW_S
        await self.write(length, count).wait()
        while len(times) < 3 or (time.perf_counter() < until and len(times) < 200):
            start = time.perf_counter()
            await self.write(length, count).wait()
            times.append(time.perf_counter() - start)
        self._fill(byte)
        await self.write(length, count).wait()
        return statistics.median(times)

    def _fill(self, byte: int) -> None:
        self._memory.fill_(byte)
        torch.cuda.synchronize()

    async def until_it_fails(self) -> float:
        """When (by the clock) a write failed, while they went on one after the other; 0 if none does in time."""
        print("writing", flush=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTICED_WITHIN_S):
                while await self.write(64 * MIB, 1).settle() is TransferState.DONE:
                    pass
                return time.monotonic()
        return 0.0

    async def run(self) -> None:
        print("ready", flush=True)
        while words := (await asyncio.to_thread(sys.stdin.readline)).split():
            print(await (self.measure(*map(int, words)) if len(words) == 3 else self.until_it_fails()), flush=True)
        await self._endpoint.close()


# -- the test --


class Child:
    def __init__(self, stack: ExitStack, gpu: str, *arguments: str) -> None:
        self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        self._name = f"{' '.join(arguments[:2])} on GPU {gpu}"
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            self._errors.seek(0)
            last_line = self._errors.read().strip().rpartition("\n")[2]
            raise RuntimeError(f"{self._name} ended: {last_line}")
        return line

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.hear()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()


def sizes_of(kind: str) -> list[tuple[int, int]]:
    """Half a gigabyte takes TCP seconds, and tells no more than a tenth of it."""
    return [size for size in SIZES if size[0] <= 64 * MIB or not kind.endswith("tcp")]


def measure_pair(kind: str, target: Child, writer: Child) -> Iterator[float]:
    """The seconds of each size. Fails unless every byte arrives."""
    for byte, (length, count) in enumerate(sizes_of(kind), start=1):
        yield float(writer.ask(length, count, byte))
        assert int(target.ask(byte, length, count)) == length * count


def kill_target(target: Child, writer: Child) -> float:
    """Seconds from the kill of the target to a write that failed, or 0."""
    assert writer.ask("kill?") == "writing"
    target.process.kill()
    killed = time.monotonic()
    failed = float(writer.hear())
    return failed and max(failed - killed, 1e-3)


@contextmanager
def columns(others: list[str]) -> Iterator[dict[tuple[str, str], tuple[Child, Child] | str]]:
    """For each backend and GPU of a target: its two processes, ready, or why there are none."""
    with ExitStack() as stack:
        found: dict[tuple[str, str], tuple[Child, Child] | str] = {}
        pairs = [(kind, other) for kind in KINDS for other in (others[:1] if kind.endswith("tcp") else others)]
        targets = {(kind, other): Child(stack, other, "target", kind) for kind, other in pairs}
        writers = {}
        for at, target in targets.items():
            try:
                writers[at] = Child(stack, "0", "writer", at[0], *target.hear().split())
            except RuntimeError as error:
                found[at] = str(error)
        for at, writer in writers.items():
            try:
                assert writer.hear() == "ready"
                found[at] = targets[at], writer
            except RuntimeError as error:
                found[at] = str(error)
        yield found


def show(seconds: float, num_bytes: int) -> str:
    took = f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
    return f"{took} {num_bytes / seconds / 1e9:.1f} GB/s"


def name_of(length: int, count: int) -> str:
    size = f"{length // MIB} MiB" if length >= MIB else f"{length // KIB} KiB"
    return size + (f" x {count}" if count > 1 else "")


def print_table(cells: dict[tuple[str, str], dict[str, str]]) -> None:
    print(f"\n{'write, through an endpoint':26}" + "".join(f"{f'{kind} 0>{to}':>26}" for kind, to in cells))
    names = [name_of(*size) for size in SIZES]
    for name in [*names, KILLED]:
        print(f"{name:26}" + "".join(f"{column.get(name, '-'):>26}" for column in cells.values()))


def measure_all() -> list[str]:
    """Prints the table, and returns what went wrong."""
    others = ["0", "1"] if torch.cuda.device_count() > 1 else ["0"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    wrong = []
    with columns(others) as found:
        for (kind, other), pair in found.items():
            column = cells[kind, other] = {}
            if isinstance(pair, str):
                wrong.append(f"{kind} to GPU {other} does not start: {pair}")
                continue
            try:
                for (length, count), seconds in zip(sizes_of(kind), measure_pair(kind, *pair), strict=True):
                    column[name_of(length, count)] = show(seconds, length * count)
                noticed = kill_target(*pair)
                column[KILLED] = f"{noticed * 1e3:.0f} ms" if noticed else f"not in {NOTICED_WITHIN_S:.0f} s"
                if not noticed and kind not in MAY_GO_ON:
                    wrong.append(f"{kind} to GPU {other}: nobody noticed that the target was killed")
            except (RuntimeError, AssertionError) as error:
                wrong.append(f"{kind} to GPU {other}: {error!r}")
    print_table(cells)
    return wrong


def test_every_backend_moves_the_memory_of_gpus() -> None:
    wrong = measure_all()
    assert not wrong, "\n".join(wrong)


def main() -> None:
    match sys.argv[1:]:
        case ["target", kind]:
            asyncio.run(serve(kind))
        case ["writer", kind, name, address, length]:
            key = RegionKey(name, int(address), int(length))
            asyncio.run(Writer(kind, key).run())
        case _:
            wrong = measure_all()
            sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
