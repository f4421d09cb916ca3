"""Sends the KV of prompts from this stage's pool to the decode stages that own its layers, chunk by chunk.

join --> progressed(chunk)... --> all pieces settled --> report to the broker --> settled (on the ring)
           `--cancel: nothing new is written; what runs is waited for

A page is written once, when its last token is computed. Two neighbouring pages that are neighbours on both sides are
still two pieces: on each side a page's layers of one leg lie together, two pages' do not (unless the leg is all of
both stages).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stagemesh.shared.core.commands import SendPlan
from stagemesh.shared.core.directory import StageInfo
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.checksums import Checksums
from stagemesh.shared.transfer.base import FINAL_STATES, Endpoint, Piece, TransferHandle, TransferState


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """How a stage's pool lies in memory: page p of layer l begins at `address + (p * len(layers) + l - lo) *
    layer_bytes`, where a layer of a page is K, then V."""

    address: int
    layers: LayerRange
    layer_bytes: int

    def at(self, page: int, layer: int) -> int:
        return self.address + (page * len(self.layers) + layer - self.layers.lo) * self.layer_bytes


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Prompt pages [first, last) have been written to `target_rank`; `crcs` of each, if they are asked for."""

    target_rank: int
    first: int
    last: int
    crcs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one writer has to say about a ticket, once nothing of it is in flight here."""

    ticket_id: str
    spans: tuple[PieceSpan, ...]
    kv_bytes: int
    error: str = ""
    in_doubt: bool = False


class Report(Protocol):
    """Where outcomes go: the broker, then the head. Returns when both know, or will learn otherwise."""

    async def __call__(self, outcome: Outcome) -> None: ...


@dataclass(slots=True)
class KvCounts:
    """What has become of the writes so far. `seconds` adds up writes that run at once; `in_doubt` are those that failed
    without proof that no byte arrives any more."""

    num_bytes: int = 0
    pieces: int = 0
    seconds: float = 0.0
    in_doubt: int = 0
    by_state: dict[TransferState, int] = field(default_factory=lambda: dict.fromkeys(FINAL_STATES, 0))

    def add(self, transfer: TransferHandle, state: TransferState, seconds: float) -> None:
        self.num_bytes += transfer.bytes_done
        self.pieces += transfer.num_pieces if state is TransferState.DONE else 0
        self.seconds += seconds
        self.in_doubt += not transfer.quiescent
        self.by_state[state] += 1


@dataclass(slots=True)
class Outgoing:
    """A prompt whose KV is on its way. From `reporting_s` on nothing is in flight any more, and the broker is told."""

    plan: SendPlan
    joined_s: float = field(default_factory=time.monotonic)
    reporting_s: float | None = None
    next_page: int = 0
    whole: bool = False  # every page has been handed to the endpoint
    cancelled: bool = False
    refused: str = ""  # why the endpoint did not take a write
    handles: list[tuple[PieceSpan, TransferHandle]] = field(default_factory=list)
    crcs: dict[PieceSpan, asyncio.Future[tuple[int, ...]]] = field(default_factory=dict)
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return self.whole or self.cancelled


class KvSender:
    """Runs on the loop. `spawn` puts a task under the stage's supervisor. With `checksums` it sums what it sends."""

    def __init__(
        self,
        endpoint: Endpoint,
        layout: PoolLayout,
        *,
        page_size: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        report: Report,
        tracer: Tracer,
        checksums: Checksums | None = None,
    ) -> None:
        self._endpoint, self._layout, self._page_size = endpoint, layout, page_size
        self._spawn, self._report, self._tracer, self._checksums = spawn, report, tracer, checksums
        self._outgoing: dict[int, Outgoing] = {}
        self._reporting: dict[int, Outgoing] = {}
        self.counts = KvCounts()

    @property
    def num_tickets(self) -> int:
        return len(self._outgoing)

    @property
    def unfinished(self) -> list[Outgoing]:
        """What is on its way, and what is being reported."""
        return [*self._outgoing.values(), *self._reporting.values()]

    def join(self, handle: int, plan: SendPlan) -> None:
        self._outgoing[handle] = Outgoing(plan)
        self._spawn(self._follow(handle))

    def progressed(self, handle: int, pages: Sequence[int], tokens_done: int) -> None:
        """The KV of the prompt's first `tokens_done` tokens is in the pool, in `pages`. Writes what is complete."""
        outgoing = self._outgoing.get(handle)
        if outgoing is None or outgoing.over:
            return
        plan = outgoing.plan
        outgoing.whole = tokens_done >= plan.prompt_tokens
        complete = pages_for(plan.prompt_tokens, self._page_size) if outgoing.whole else tokens_done // self._page_size
        first, outgoing.next_page = outgoing.next_page, complete
        if first < complete:
            for target in plan.targets:
                self._write(outgoing, target, pages, first, complete)
        outgoing.progress.set()

    def cancel(self, handle: int) -> None:
        """Nothing more is to be written for this sequence."""
        if (outgoing := self._outgoing.get(handle)) is not None:
            self._give_up(outgoing)
            for _, transfer in outgoing.handles:
                transfer.cancel()

    def _give_up(self, outgoing: Outgoing) -> None:
        """Nothing more is handed over; what is under way ends by itself."""
        outgoing.cancelled = True
        outgoing.progress.set()

    def _write(self, outgoing: Outgoing, target: StageInfo, pages: Sequence[int], first: int, last: int) -> None:
        layers = self._layout.layers.intersect(target.layers)
        if layers is None:
            return
        there = PoolLayout(target.pool.address, target.layers, self._layout.layer_bytes)
        length = len(layers) * self._layout.layer_bytes
        pieces = [
            Piece(self._layout.at(pages[index], layers.lo), there.at(outgoing.plan.pages[index], layers.lo), length)
            for index in range(first, last)
        ]
        try:
            transfer = self._endpoint.write(target.pool, pieces)
        except StagemeshError as error:  # a slow or wrong peer costs this ticket, not this stage
            outgoing.refused = outgoing.refused or str(error)
            self._give_up(outgoing)
            return
        span = PieceSpan(target.pp_rank, first, last)
        outgoing.handles.append((span, transfer))
        self._spawn(self._watch(outgoing, transfer))
        if self._checksums is not None:
            outgoing.crcs[span] = asyncio.get_running_loop().create_future()
            self._spawn(self._sum(outgoing.crcs[span], self._checksums.of(pages[first:last], layers)))

    async def _sum(self, crcs: asyncio.Future[tuple[int, ...]], work: Awaitable[tuple[int, ...]]) -> None:
        crcs.set_result(await work)

    async def _watch(self, outgoing: Outgoing, transfer: TransferHandle) -> None:
        ticket_id = outgoing.plan.ticket_id
        start_ns = time.monotonic_ns()
        state = await transfer.settle()
        end_ns = time.monotonic_ns()
        self._tracer.span("kv_write", start_ns, end_ns, ticket=ticket_id, bytes=transfer.num_bytes, state=state.value)
        self._tracer.requests.wrote(ticket_id, start_ns, end_ns, num_bytes=transfer.num_bytes, state=state.value)
        self.counts.add(transfer, state, (end_ns - start_ns) / 1e9)
        if state is TransferState.FAILED:
            self._give_up(outgoing)  # the ticket has failed: no more is worth sending

    async def _follow(self, handle: int) -> None:
        """The life of one outgoing prompt, to the report."""
        outgoing = self._outgoing[handle]
        while not outgoing.over:
            outgoing.progress.clear()
            await outgoing.progress.wait()
        for _, transfer in outgoing.handles:
            await transfer.settle()
        for crcs in outgoing.crcs.values():
            await crcs
        del self._outgoing[handle]
        self._reporting[handle], outgoing.reporting_s = outgoing, time.monotonic()
        await self._report(self._outcome(outgoing))
        self._tracer.requests.reported(outgoing.plan.ticket_id)
        del self._reporting[handle]

    def _outcome(self, outgoing: Outgoing) -> Outcome:
        done = [(span, transfer) for span, transfer in outgoing.handles if transfer.state is TransferState.DONE]
        failed = [transfer for _, transfer in outgoing.handles if transfer.state is not TransferState.DONE]
        errors = [str(transfer.error) for transfer in failed if transfer.error]
        error = "cancelled" if outgoing.cancelled and not outgoing.whole else ""
        return Outcome(
            outgoing.plan.ticket_id,
            spans=tuple(_with_crcs(span, outgoing) for span, _ in done),
            kv_bytes=sum(transfer.num_bytes for _, transfer in done),
            error=outgoing.refused or (errors[0] if errors else error),
            in_doubt=any(not transfer.quiescent for transfer in failed),
        )


def _with_crcs(span: PieceSpan, outgoing: Outgoing) -> PieceSpan:
    crcs = outgoing.crcs.get(span)
    return span if crcs is None else replace(span, crcs=crcs.result())
