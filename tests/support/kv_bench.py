"""KV senders over in-memory endpoints: a prefill instance whose KV is made up, and a decode instance that gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch

from stagemesh.shared.core.commands import SendPlan
from stagemesh.shared.core.directory import RegionKey, StageInfo
from stagemesh.shared.core.layers import LayerRange, split_layers
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.kv_sender import KvSender, Outcome, PoolLayout
from stagemesh.shared.transfer.memory import MemoryEndpoint, MemoryFabric

PAGE_SIZE, HEADS, HEAD_DIM, NUM_PAGES = 4, 1, 2, 12
LAYER_BYTES = 2 * PAGE_SIZE * HEADS * HEAD_DIM * 4
UNTOUCHED = -1.0


def pool_of(layers: LayerRange) -> torch.Tensor:
    return torch.full((NUM_PAGES, len(layers), 2, PAGE_SIZE, HEADS, HEAD_DIM), UNTOUCHED)


@dataclass(slots=True)
class Reports:
    """What writers have said, and when enough have."""

    outcomes: list[Outcome] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.news.set()

    async def wait_for(self, count: int) -> list[Outcome]:
        while len(self.outcomes) < count:
            self.news.clear()
            await self.news.wait()
        return self.outcomes


class Bench:
    """A prefill instance whose KV is made up, and a decode instance that gets it."""

    def __init__(
        self, group: asyncio.TaskGroup, writers: Sequence[int], targets: Sequence[int], *, batch_pieces: int = 256
    ) -> None:
        self.fabric, self.group = MemoryFabric(), group
        self.writer_layers = split_layers(sum(writers), len(writers), writers)
        self.target_layers = split_layers(sum(targets), len(targets), targets)
        self.sources = [pool_of(layers) for layers in self.writer_layers]
        self.sinks = [pool_of(layers) for layers in self.target_layers]
        for rank, pool in enumerate(self.sources):
            torch.arange(pool.numel(), out=pool.view(-1)).add_(1_000_000 * (rank + 1))
        self.endpoints = [
            MemoryEndpoint(self.fabric, f"p{rank}", max_batch_pieces=batch_pieces) for rank in range(len(writers))
        ]
        self.keys = [self.publish(f"d{rank}", pool) for rank, pool in enumerate(self.sinks)]
        self.reports = Reports()
        self.senders = [self.sender(rank) for rank in range(len(writers))]

    def publish(self, name: str, pool: torch.Tensor) -> RegionKey:
        endpoint = MemoryEndpoint(self.fabric, name)
        return endpoint.publish(endpoint.register(pool))

    def sender(self, rank: int) -> KvSender:
        pool = self.sources[rank]
        self.endpoints[rank].register(pool)
        return KvSender(
            self.endpoints[rank],
            PoolLayout(pool.data_ptr(), self.writer_layers[rank], LAYER_BYTES),
            page_size=PAGE_SIZE,
            spawn=self.group.create_task,
            report=self.reports,
            tracer=Tracer("test"),
        )

    def plan(self, ticket_id: str, prompt_tokens: int, pages: Sequence[int]) -> SendPlan:
        targets = tuple(
            StageInfo(rank, layers, f"unix:d{rank}", key)
            for rank, (layers, key) in enumerate(zip(self.target_layers, self.keys, strict=True))
        )
        return SendPlan(ticket_id, prompt_tokens, tuple(pages), targets)

    def check_sinks(self, moved: dict[int, int]) -> None:
        """`moved`, page there -> page here, has arrived, whole, and nothing else has changed."""
        source = torch.cat(self.sources, dim=1)
        expected = torch.full_like(source, UNTOUCHED)
        for there, here in moved.items():
            expected[there] = source[here]
        assert torch.equal(torch.cat(self.sinks, dim=1), expected)


def run(
    body: Callable[[Bench], Awaitable[None]],
    writers: Sequence[int] = (2, 2),
    targets: Sequence[int] = (1, 3),
    *,
    batch_pieces: int = 256,
) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            bench = Bench(group, writers, targets, batch_pieces=batch_pieces)
            await body(bench)
        assert all(sender.num_tickets == 0 for sender in bench.senders)

    asyncio.run(main())
