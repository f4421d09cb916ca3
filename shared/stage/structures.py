"""The structures of a last stage: compiled off its hot path before their requests come, and kept.

prepare --known: at once
        `-new--> the worker process (started with the first) --> compiled, within limits --> `Grammars` of the runner
                    `--is none, or takes too much: Rejected, naming the field
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from stagemesh.shared.core.sampling import Structure
from stagemesh.shared.engine.grammar import Grammars
from stagemesh.shared.engine.runner import StageRunner
from stagemesh.shared.engine.vocabulary import Vocabulary
from stagemesh.shared.errors import Exhausted, Rejected, Retryable
from stagemesh.shared.model.source import open_model
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import Sample, by_label

MAX_COMPILING: Final = 2  # at once
MAX_WAITING: Final = 64
COMPILE_S: Final = 5.0
COMPILE_BYTES: Final = 1 << 30
START_S: Final = 60.0
STOP_S: Final = 5.0
LINE_BYTES: Final = 1 << 20


class Structures:
    """Of the model that `spec` names. `spawn` puts a task under the stage's supervisor."""

    def __init__(self, runner: StageRunner, spec: str, spawn: Callable[[Any], object], log: Log) -> None:
        self._runner, self._spec, self._spawn, self._log = runner, spec, spawn, log
        self._worker: CompilerProcess | None = None
        self._starting, self._started = asyncio.Lock(), asyncio.Event()
        self._room = asyncio.Semaphore(MAX_COMPILING)
        self._compiling: dict[Structure, asyncio.Future[None]] = {}
        self.compiled = self.refused = 0
        self.compile_s = 0.0

    @property
    def worker_pid(self) -> int | None:
        """Of the process that compiles, if one has been started."""
        return None if self._worker is None else self._worker.pid

    async def prepare(self, structure: Structure) -> None:
        """It can be joined with from now on. Raises Rejected if it is none, or takes too much to compile; Exhausted if
        too many wait."""
        if self._runner.grammars is not None and self._runner.grammars.touch(structure):
            return
        compiling = self._compiling.get(structure)
        if compiling is None:
            if len(self._compiling) >= MAX_WAITING:
                raise Exhausted(f"{MAX_WAITING} structures wait to be compiled", retry_after_s=1.0)
            compiling = self._compiling[structure] = asyncio.get_running_loop().create_future()
            compiling.add_done_callback(_retrieve)
            self._spawn(self._compile(structure, compiling))
        await asyncio.shield(compiling)

    async def _compile(self, structure: Structure, done: asyncio.Future[None]) -> None:
        """Runs on when those who wait for it have gone: the next one finds it made."""
        start_s = time.monotonic()
        try:
            async with self._room:
                grammars, worker = await self._ready()
                payload, num_bytes = await worker.compile(structure)
                compiled = await asyncio.to_thread(_restored, payload, structure, grammars.vocabulary)
            grammars.take(structure, compiled, num_bytes)
            self.compiled += 1
            done.set_result(None)
        except Exception as error:  # theirs who wait for it; the stage goes on
            self.refused += isinstance(error, Rejected)
            self._log.info("a structure was not compiled", kind=structure.kind, error=str(error))
            done.set_exception(error)
        finally:
            self.compile_s += time.monotonic() - start_s
            del self._compiling[structure]
            done.cancel()

    async def _ready(self) -> tuple[Grammars, CompilerProcess]:
        async with self._starting:
            if self._runner.grammars is None:
                if find_spec("xgrammar") is None:
                    raise Rejected("structure", "needs the package xgrammar on the stages, which is not installed")
                self._runner.grammars = Grammars(await asyncio.to_thread(vocabulary_of, self._spec))
            grammars = self._runner.grammars
            if self._worker is None or self._worker.is_gone:
                self._worker = await CompilerProcess.start(grammars.vocabulary)
                self._started.set()
            return grammars, self._worker

    async def run(self) -> None:
        """A child of the stage: takes what the worker has made. Runs until cancelled."""
        while True:
            await self._started.wait()
            self._started.clear()
            assert self._worker is not None
            await self._worker.read()

    def measure(self) -> Iterator[Sample]:
        grammars = self._runner.grammars
        outcomes = {"compiled": self.compiled, "refused": self.refused}
        yield from by_label(
            metrics.STRUCTURES, {**outcomes, "again": 0 if grammars is None else grammars.late_compiles}
        )
        yield Sample(metrics.STRUCTURES_HELD, 0 if grammars is None else len(grammars))
        yield Sample(metrics.STRUCTURE_SECONDS, self.compile_s)
        yield Sample(metrics.MASKS, 0 if grammars is None else grammars.masks)
        yield Sample(metrics.MASK_SECONDS, 0.0 if grammars is None else grammars.mask_ns / 1e9)
        yield Sample(metrics.MASK_WAIT_SECONDS, 0.0 if grammars is None else grammars.wait_ns / 1e9)

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
        if self._runner.grammars is not None:
            self._runner.grammars.close()


class CompilerProcess:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._answers: dict[int, asyncio.Future[tuple[bytes, int]]] = {}
        self._last = 0
        self.is_gone = False

    @classmethod
    async def start(cls, vocabulary: Vocabulary) -> CompilerProcess:
        worker = "stagemesh.shared.engine.structure_worker"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", worker, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES
        )
        begin = {
            "tokens": list(vocabulary.tokens),
            "tokenizer_json": vocabulary.tokenizer_json,
            "end_ids": vocabulary.end_ids,
            "seconds": COMPILE_S,
            "num_bytes": COMPILE_BYTES,
        }
        self = cls(process)
        await self._write(begin)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    async def compile(self, structure: Structure) -> tuple[bytes, int]:
        """Serialized, and its size in memory. Raises Rejected, or Retryable if the process is gone or the host busy."""
        self._last += 1
        number, answer = self._last, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._write({"id": number, "kind": structure.kind, "text": structure.text})
            async with asyncio.timeout(START_S):
                payload, num_bytes = await answer
        except TimeoutError:
            raise Retryable("the process that compiles structures does not answer") from None
        finally:
            del self._answers[number]
        if num_bytes < 0:
            raise Rejected(structure.kind, payload.decode(errors="replace"))
        return payload, num_bytes

    async def read(self) -> None:
        """Hands answers out until the process ends."""
        assert self._process.stdout is not None
        with suppress(asyncio.IncompleteReadError, ValueError):
            while line := await self._process.stdout.readline():
                header = json.loads(line)
                payload = await self._process.stdout.readexactly(header["size"])
                answer = self._answers.get(header["id"])
                if answer is None or answer.done():
                    continue
                if header["busy"]:
                    answer.set_exception(Retryable(payload.decode()))
                else:
                    answer.set_result((payload, header["bytes"] if header["ok"] else -1))
        self.is_gone = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Retryable("the process that compiles structures has ended"))
        await self._process.wait()

    async def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except (OSError, RuntimeError):  # uvloop raises RuntimeError for a pipe that it has closed already
            self.is_gone = True
            raise Retryable("the process that compiles structures has ended") from None

    async def close(self) -> None:
        """Its stdin's end ends it, and what it compiles."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def vocabulary_of(spec: str) -> Vocabulary:
    """Of the model that `spec` names. Raises Rejected if it has no tokenizer."""
    source = open_model(spec)
    tokenizer, config = source.tokenizer(), source.config
    return Vocabulary(tokenizer.plain_tokens(config.vocab_size), tokenizer.to_json(), config.eos_token_ids)


def _restored(payload: bytes, structure: Structure, vocabulary: Vocabulary) -> Any:
    from xgrammar import CompiledGrammar

    return CompiledGrammar.deserialize_json(payload.decode(), vocabulary.info_for(structure.kind))


def _retrieve(done: asyncio.Future[None]) -> None:
    """Nobody may wait for it any more: its error is no news then."""
    if not done.cancelled():
        done.exception()
