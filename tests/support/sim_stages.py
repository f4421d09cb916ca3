"""The stages of an instance without a model: they apply commands as real ones do, and remember which KV lies where.

Tokens are a deterministic fake, so that a stage can tell whether a row got the right input id, found the KV of every
position before its own, and wrote to pages that are its own.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from stagemesh.shared.core.commands import FROM_STEP, HANDLE, SAMPLE, Command, Step, unpack_deltas
from stagemesh.shared.core.identity import RequestRef
from tests.support.sim_copies import SimCopy, SimHost

VOCAB_SIZE = 16


def token_at(request: RequestRef, position: int) -> int:
    """The token of `request` at `position`, of its prompt or new. All requests of an id `...~FAMILY~N` have the same
    first N tokens."""
    _, *shared = request.request_id.split("~")
    author = shared[0] if shared and position < int(shared[1]) else str(request)
    mixed = zlib.crc32(f"{author}:{position}".encode()) * 0x9E3779B1 >> 20  # a CRC alone is alike for alike names
    return mixed % VOCAB_SIZE


class Kv(NamedTuple):
    """What one slot of a pool holds: what follows from the tokens up to there, as `text` stands for."""

    text: int
    position: int
    token: int


def kv_at(request: RequestRef, position: int) -> Kv:
    return Kv(_texts(request, position), position, token_at(request, position))


@lru_cache(maxsize=4096)
def _known_texts(request: RequestRef) -> list[int]:
    """For each position a digest of the tokens up to there, as far as it has been asked for."""
    return []


def _texts(request: RequestRef, position: int) -> int:
    known = _known_texts(request)
    while len(known) <= position:
        known.append(hash((known[-1] if known else 0, token_at(request, len(known)))))
    return known[position]


@dataclass(slots=True)
class Resident:
    request: RequestRef
    pages: list[int] = field(default_factory=list)


class SimStage:
    """One stage. Every way in which a command can be malformed fails an assertion. A page may have several owners only
    where `shared` is allowed, and then only the first of them, while it lives, writes to it."""

    def __init__(self, num_pages: int, page_size: int, *, shared: bool = False) -> None:
        self.num_pages, self.page_size, self.shared = num_pages, page_size, shared
        self.residents: dict[int, Resident] = {}
        self.owner: dict[int, list[int]] = {}  # page -> the handles that have it
        self.writer: dict[int, int] = {}  # page -> the first of them, also when it is gone
        self.pool: dict[int, Kv] = {}  # slot -> what lies there
        self.last_number = 0
        self.used_handles: set[int] = set()
        self.host = SimHost(page_size)

    def apply(self, command: Command) -> None:
        assert command.number == self.last_number + 1
        self.last_number = command.number
        for handle in command.drops:
            self.host.drop(handle)
            for page in self.residents.pop(handle).pages:
                self.owner[page].remove(handle)
                if not self.owner[page]:
                    del self.owner[page], self.writer[page]
        for handle in command.cancels:
            assert handle in self.used_handles
        for join in command.joins:
            assert join.handle not in self.used_handles
            self.used_handles.add(join.handle)
            self.residents[join.handle] = Resident(join.request)
        for handle in command.retracts:
            self.host.retract(handle, self.residents[handle].pages)
            self.residents[handle].pages = []
        for handle, pages in unpack_deltas(command.page_deltas):
            for page in pages:
                assert 0 <= page < self.num_pages
                assert self.shared or page not in self.owner, f"page {page} has two owners"
                self.owner.setdefault(page, []).append(handle)
                self.writer.setdefault(page, handle)
            self.residents[handle].pages += pages
        for handle in command.resumes:
            self.host.resume(handle, self.residents[handle].pages)

    def finish_copy(self, pick: int) -> SimCopy:
        """A copy is done: pages that were copied to host memory have no owner any more."""
        copy = self.host.finish(pick, self.pool)
        if not copy.restored:
            for page in copy.pages:
                assert self.owner.pop(page) == [copy.handle]
                del self.writer[page]
        return copy

    def run(self, step: Step, inputs: list[int]) -> list[int]:
        """The id that each row samples, or -1. `inputs` are the ids of all rows, in order."""
        sampled, at = [], 0
        for handle, start, count, _, _, flags in step.rows.tolist():
            resident = self.residents[handle]
            assert not self.host.is_copying(handle)
            for position in range(start):
                found = self.pool.get(self.slot(resident, position))
                assert found == kv_at(resident.request, position), f"{resident.request}: {found} at {position}"
            for position in range(start, start + count):
                kv = kv_at(resident.request, position)
                assert kv.token == inputs[at]
                slot = self.slot(resident, position)
                assert self.writer[slot // self.page_size] == handle, f"{resident.request} writes to another's page"
                self.pool[slot] = kv
                at += 1
            sampled.append(token_at(resident.request, start + count) if flags & SAMPLE else -1)
        assert at == len(inputs)
        return sampled

    def slot(self, resident: Resident, position: int) -> int:
        return resident.pages[position // self.page_size] * self.page_size + position % self.page_size

    def write_from_elsewhere(self, page: int, request: RequestRef, first: int, last: int) -> None:
        """A remote writer fills `page` with the KV of positions [first, last)."""
        for position in range(first, last):
            self.pool[page * self.page_size + position % self.page_size] = kv_at(request, position)


class SimPipeline:
    """Stages in a ring, each with its queue; a test decides which one moves next.

    issue --> queue of every stage --> [inputs there?] --> apply, run --> ... --> inbox of the head
    """

    def __init__(self, num_stages: int, num_pages: int, page_size: int, *, shared: bool = False) -> None:
        self.stages = [SimStage(num_pages, page_size, shared=shared) for _ in range(num_stages)]
        self.queues: list[deque[Command | int]] = [deque() for _ in range(num_stages)]
        self.arrived: list[dict[int, list[int]]] = [{} for _ in range(num_stages)]  # step -> its input ids
        self.sampled: dict[int, list[int]] = {}  # on the first stage
        self.inbox: deque[tuple[int, list[int] | None]] = deque()  # a step and its ids, or a command and None
        self.rows_run: dict[RequestRef, int] = {}  # on the last stage
        self.copied: deque[tuple[int, int, bool]] = deque()  # handle, rank, restored: on the way to the head

    def issue(self, command: Command) -> None:
        for queue in self.queues:
            queue.append(command)

    def movable(self) -> list[int]:
        """Ranks that have something to do."""
        return [rank for rank in range(len(self.stages)) if self.queues[rank] and self._inputs_there(rank)]

    def _inputs_there(self, rank: int) -> bool:
        item = self.queues[rank][0]
        if isinstance(item, int) or item.step is None:
            return True
        if rank == 0:
            return item.step.source_steps <= self.sampled.keys()
        return item.step.number in self.arrived[rank]

    def move(self, rank: int) -> Command | None:
        """The stage does one thing. Returns the command that it has applied."""
        item = self.queues[rank].popleft()
        if isinstance(item, int):
            self._acknowledge(rank, item)
            return None
        self.stages[rank].apply(item)
        if item.step is not None:
            self._run(rank, item.step)
        elif rank == 0:
            self._acknowledge(rank, item.number)
        return item

    def copying(self) -> list[int]:
        """Ranks that have a copy under way."""
        return [rank for rank, stage in enumerate(self.stages) if stage.host.under_way]

    def finish_copy(self, rank: int, pick: int = 0) -> None:
        copy = self.stages[rank].finish_copy(pick)
        self.copied.append((copy.handle, rank, copy.restored))

    def _acknowledge(self, rank: int, number: int) -> None:
        if rank + 1 < len(self.stages):
            self.queues[rank + 1].append(number)
        else:
            self.inbox.append((number, None))

    def _run(self, rank: int, step: Step) -> None:
        inputs = self._input_ids(step) if rank == 0 else self.arrived[rank].pop(step.number)
        ids = self.stages[rank].run(step, inputs)
        if rank + 1 < len(self.stages):
            self.arrived[rank + 1][step.number] = inputs
            return
        self.inbox.append((step.number, ids))
        for handle in step.rows[:, HANDLE].tolist():
            request = self.stages[rank].residents[handle].request
            self.rows_run[request] = self.rows_run.get(request, 0) + 1

    def _input_ids(self, step: Step) -> list[int]:
        literal, ids = iter(step.tokens.tolist()), []
        for _, _, count, source_step, source_row, flags in step.rows.tolist():
            if flags & FROM_STEP:
                assert count == 1
                ids.append(self.sampled[source_step][source_row])
            else:
                ids += [next(literal) for _ in range(count)]
        assert next(literal, None) is None
        return ids

    @property
    def quiet(self) -> bool:
        return not (self.inbox or self.copied or self.copying() or any(self.queues))

    def check_empty(self) -> None:
        """Nothing is under way, and no stage knows any sequence."""
        assert self.quiet
        for stage in self.stages:
            assert not stage.residents
            assert not stage.owner
            assert not stage.host.copies
