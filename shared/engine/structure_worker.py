"""A process that compiles structures, each in a child of its own under limits of time and memory: whatever a schema
does to the compiler, it does to that child alone.

stdin: {"vocabulary"} once --> loaded   {"id", "structure"} --fork--> child: compile -> memory file -> exit
stdout: a header line {"id", "ok", "busy", "bytes", "size"}, then `size` bytes, as each child ends
stdin's end ends it all
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
from dataclasses import dataclass
from typing import Any, Final

from stagemesh.shared.core.sampling import STRUCTURE_KINDS, Structure
from stagemesh.shared.engine.vocabulary import Vocabulary, compile_structure
from stagemesh.shared.errors import Rejected

MAX_COMPILED_BYTES: Final = 64 << 20
NICE: Final = 5  # a stage's steps go first
MAX_MASK_S: Final = 0.05  # of a core, that a mask may take
SHARE_OF_A_CORE: Final = 1 / 3
"""That a compilation gets at least: with less, on a host that is busy with other things, it is given up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one compilation: seconds of a core, bytes beyond what the process has already."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    kind: str
    pid: int
    memory: int  # a file descriptor of what the child leaves


class _Lines:
    """Whole lines of stdin. Nothing is left in a buffer that a selector knows nothing of."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Those that have come; None at the end. Waits if nothing has come."""
        data = os.read(sys.stdin.fileno(), 1 << 20)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def main() -> None:
    """Runs until stdin ends."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, which ends this
    os.nice(NICE)
    lines, first = _Lines(), list[bytes]()
    while not first:
        if (read := lines.read()) is None:
            return
        first = read
    begin = json.loads(first[0])
    vocabulary = Vocabulary(begin["tokens"], begin["tokenizer_json"], begin["end_ids"])
    for kind in STRUCTURE_KINDS:
        vocabulary.info_for(kind)
    _serve(lines, first[1:], vocabulary, Limits(begin["seconds"], begin["num_bytes"]))


def _serve(lines: _Lines, waiting: list[bytes], vocabulary: Vocabulary, limits: Limits) -> None:
    jobs: dict[int, _Job] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            for line in waiting:
                job, watched = _start(json.loads(line), vocabulary, limits)
                jobs[watched] = job
                selector.register(watched, selectors.EVENT_READ)
            waiting = []
            for key, _events in selector.select():
                if key.fd != sys.stdin.fileno():
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _finish(jobs.pop(key.fd), limits)
                elif (read := lines.read()) is None:
                    return
                else:
                    waiting += read


def _start(request: dict[str, Any], vocabulary: Vocabulary, limits: Limits) -> tuple[_Job, int]:
    structure = Structure(request["kind"], request["text"])
    memory = os.memfd_create("structure")
    pid = os.fork()
    if pid == 0:
        try:
            _limit(limits)
            os.write(memory, b"-")
            _leave(memory, _compiled(vocabulary, structure))
            os._exit(0)
        except Rejected as error:
            _leave(memory, b"-" + str(error).partition(": ")[2].encode())
        except MemoryError:
            _leave(memory, b"-" + _too_much(limits).encode())
        os._exit(1)
    return _Job(request["id"], structure.kind, pid, memory), os.pidfd_open(pid)


def _compiled(vocabulary: Vocabulary, structure: Structure) -> bytes:
    """What the child leaves: the compiled grammar's size in memory, and its serialized form."""
    import time

    from xgrammar import GrammarMatcher, allocate_token_bitmask

    compiled = compile_structure(vocabulary, structure)
    matcher, mask = GrammarMatcher(compiled), allocate_token_bitmask(1, len(vocabulary.tokens))
    start_s = time.thread_time()  # what else the host does is no fault of the structure's
    matcher.fill_next_token_bitmask(mask)
    if time.thread_time() - start_s > MAX_MASK_S:
        raise Rejected(structure.kind, f"its masks take longer than {MAX_MASK_S} s each")
    if not mask.any():
        raise Rejected(structure.kind, "no token of this model can begin it")
    serialized: bytes = compiled.serialize_json().encode()
    if len(serialized) > MAX_COMPILED_BYTES:
        raise Rejected(structure.kind, f"takes {len(serialized)} bytes compiled, the limit is {MAX_COMPILED_BYTES}")
    return b"+" + int(compiled.memory_size_bytes).to_bytes(8, "little") + serialized


def _leave(memory: int, said: bytes) -> None:
    os.ftruncate(memory, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    with os.fdopen(memory, "wb", closefd=False) as stream:
        stream.write(said)


def _finish(job: _Job, limits: Limits) -> None:
    _, status = os.waitpid(job.pid, 0)
    os.lseek(job.memory, 0, os.SEEK_SET)
    with os.fdopen(job.memory, "rb") as stream:
        said = stream.read()
    ok = status == 0 and said[:1] == b"+"
    payload = said[9:] if ok else _why(status, said, limits).encode()
    is_busy = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    header = {
        "id": job.number,
        "ok": ok,
        "busy": is_busy,
        "bytes": int.from_bytes(said[1:9], "little"),
        "size": len(payload),
    }
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + payload)
    sys.stdout.buffer.flush()


def _why(status: int, said: bytes, limits: Limits) -> str:
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGALRM:
            return f"the host had no {limits.seconds:g} s of a core to compile it within {_clock_s(limits):g} s"
        if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL):
            return f"takes longer to compile than {limits.seconds:g} s"
        return _too_much(limits)
    return said[1:].decode(errors="replace") or _too_much(limits)


def _too_much(limits: Limits) -> str:
    return f"nests too deep, or takes more to compile than {limits.num_bytes >> 20} MiB"


def _limit(limits: Limits) -> None:
    """In the child. A signal's default action also ends what never comes back to Python."""
    _die_with_parent()
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + limits.num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.setitimer(signal.ITIMER_REAL, _clock_s(limits))


def _clock_s(limits: Limits) -> float:
    return limits.seconds / SHARE_OF_A_CORE


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
