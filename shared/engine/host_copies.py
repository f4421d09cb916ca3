"""The KV of retracted sequences in host memory, and the thread that copies it there and back.

retract --> saving --(copier)--> saved --resume--> loading --(copier)--> gone
                                 saved --drop--> gone

A stage's runner gives the orders, from its own thread, and goes on at once: the pages of a copy under way belong to no
step until every stage has said that it is done, and until then no command drops or turns back the copy. So the pool
needs no lock; only the records here do, which both threads change and a third one reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from stagemesh.shared.errors import Bug, ProtocolViolation


class Direction(Enum):
    """Where a copy goes."""

    TO_HOST = "to_host"
    TO_POOL = "to_pool"


class PageCopier(Protocol):
    """Copies whole pages of one pool. `save` and `load` are called where commands are applied, and so come after all
    steps of earlier commands on whatever the pool's device orders them by; they return the work, which is done on the
    copier's thread and returns when the bytes are there."""

    @property
    def page_bytes(self) -> int: ...

    def save(self, pages: Sequence[int]) -> Callable[[], Tensor]:
        """The work returns uint8 [pages, page_bytes] in host memory."""

    def load(self, saved: Tensor, pages: Sequence[int]) -> Callable[[], None]:
        """`saved` as `save` made it, as many `pages`."""


class CpuPageCopier:
    """For a pool in host memory. Plain moves of bytes that leave the interpreter to other threads, on one core."""

    def __init__(self, pool: Tensor) -> None:
        """`pool` is [num_pages, layers, 2, page_size, kv_heads, head_dim], contiguous."""
        self._pages = pool.flatten(1).view(torch.uint8).numpy()

    @property
    def page_bytes(self) -> int:
        return int(self._pages.shape[1])

    def save(self, pages: Sequence[int]) -> Callable[[], Tensor]:
        return lambda: torch.from_numpy(self._pages.take(pages, axis=0))

    def load(self, saved: Tensor, pages: Sequence[int]) -> Callable[[], None]:
        def move() -> None:
            self._pages[list(pages)] = saved.numpy()

        return move


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A copy is over. `error` is None if its bytes are where they should be."""

    handle: int
    direction: Direction
    error: BaseException | None


@dataclass(slots=True)
class CopyCounts:
    """Of copies that are over. `seconds` are from order to end, added up over copies that wait for each other."""

    copies: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class HostCopy:
    """`way` is None while nothing moves: `data` is whole then. `since_s` is the time of the last change."""

    num_pages: int
    way: Direction | None = Direction.TO_HOST
    data: Tensor | None = None  # uint8 [num_pages, page_bytes]
    since_s: float = field(default_factory=time.monotonic)


def hear_nothing(done: CopyDone) -> None:
    """For who runs a stage without a ring."""


class HostCopies:
    """Of one stage. At most one copy a handle, so what waits for the copier is bounded by the sequences there are.
    `max_bytes` is the budget that the head keeps within."""

    def __init__(self, copier: PageCopier, max_bytes: int) -> None:
        self._copier, self.max_bytes = copier, max_bytes
        self._lock = threading.Lock()
        self._copies: dict[int, HostCopy] = {}
        self._counts = {direction: CopyCounts() for direction in Direction}
        self._worker = ThreadPoolExecutor(1, "copier")  # has no thread before its first copy
        self._hear: Callable[[CopyDone], object] = hear_nothing

    def listen(self, hear: Callable[[CopyDone], object]) -> None:
        """`hear` is called on the copier's thread, once for each copy. Before the first command."""
        self._hear = hear

    def close(self) -> None:
        """Waits for the copy that runs; the others are never made."""
        self._worker.shutdown(cancel_futures=True)

    # -- orders --

    def save(self, handle: int, pages: Sequence[int]) -> None:
        """Raises ProtocolViolation if there is a copy of it already."""
        with self._lock:
            if handle in self._copies:
                raise ProtocolViolation(f"sequence {handle} is retracted, but its KV is not all here")
            copy = self._copies[handle] = HostCopy(len(pages))
        self._order(handle, copy, Direction.TO_HOST, self._copier.save(tuple(pages)))

    def load(self, handle: int, pages: Sequence[int]) -> None:
        """Back into the first of `pages`. Raises ProtocolViolation without a whole copy, or with too few pages."""
        copy, data = self._whole(handle, "resumed")
        if len(pages) < copy.num_pages:
            raise ProtocolViolation(f"sequence {handle} is resumed into {len(pages)} pages of {copy.num_pages}")
        with self._lock:
            copy.way, copy.since_s = Direction.TO_POOL, time.monotonic()
        self._order(handle, copy, Direction.TO_POOL, self._copier.load(data, tuple(pages[: copy.num_pages])))

    def drop(self, handle: int) -> None:
        """Frees the copy, if there is one. Raises ProtocolViolation if it is under way."""
        if handle in self:
            self._whole(handle, "dropped")
            with self._lock:
                del self._copies[handle]

    def __contains__(self, handle: int) -> bool:
        return handle in self._copies

    def _whole(self, handle: int, verb: str) -> tuple[HostCopy, Tensor]:
        copy = self._copies.get(handle)
        if copy is None:
            raise ProtocolViolation(f"sequence {handle} is {verb}, but it has no host copy")
        with self._lock:
            if copy.way is not None or copy.data is None:
                raise ProtocolViolation(f"sequence {handle} is {verb}, but a copy of it is under way")
            return copy, copy.data

    # -- the copier's thread --

    def _order(self, handle: int, copy: HostCopy, direction: Direction, work: Callable[[], Tensor | None]) -> None:
        self._worker.submit(work).add_done_callback(lambda done: self._settle(handle, copy, direction, done))

    def _settle(self, handle: int, copy: HostCopy, direction: Direction, done: Future[Tensor | None]) -> None:
        if done.cancelled():
            return
        error, now_s = done.exception(), time.monotonic()
        if error is None:
            with self._lock:
                counts = self._counts[direction]
                counts.copies, counts.seconds = counts.copies + 1, counts.seconds + now_s - copy.since_s
                counts.num_bytes += copy.num_pages * self._copier.page_bytes
                copy.way, copy.data, copy.since_s = None, done.result(), now_s
                if direction is Direction.TO_POOL:
                    del self._copies[handle]
        self._hear(CopyDone(handle, direction, error))

    # -- views --

    @property
    def copies(self) -> dict[int, HostCopy]:
        """By handle, oldest first: a snapshot of the records as they are now."""
        with self._lock:
            return {handle: replace(copy, data=None) for handle, copy in self._copies.items()}

    @property
    def num_bytes(self) -> int:
        """Of host memory, taken or about to be."""
        with self._lock:
            return sum(copy.num_pages for copy in self._copies.values()) * self._copier.page_bytes

    @property
    def counts(self) -> dict[Direction, CopyCounts]:
        with self._lock:
            return {direction: replace(counts) for direction, counts in self._counts.items()}

    def check_integrity(self) -> None:
        """Raises Bug if the head has lent more than there is."""
        if self.num_bytes > self.max_bytes:
            raise Bug(f"host copies take {self.num_bytes} bytes of {self.max_bytes}")
