"""Runs the stages of a model in one process over paged pools, as an instance would: chunks, then decode rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stagemesh.shared.core.layers import split_layers
from stagemesh.shared.model.batch import ForwardBatch
from stagemesh.shared.model.layers import StageModel, allocate_pool
from stagemesh.shared.model.source import ModelSource


@dataclass(slots=True)
class Row:
    """One sequence: its tokens so far, its pages, how many tokens have KV, and the logits of its last token."""

    tokens: list[int]
    pages: list[int]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


class PagedModel:
    """`pp_size` stages with a pool each. Pages are handed out in a scrambled order and pools start out as garbage, so
    that nothing works by luck."""

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        *,
        pp_size: int = 1,
        sizes: Sequence[int] | None = None,
        page_size: int = 4,
        num_pages: int = 64,
    ) -> None:
        self.page_size = page_size
        ranges = split_layers(source.config.num_layers, pp_size, sizes)
        self.stages, self.pools = [], []
        for layers in ranges:
            first, last = layers == ranges[0], layers == ranges[-1]
            weights = source.load(layers, dtype, first=first, last=last)
            self.stages.append(StageModel(source.config, layers, weights, dtype, first=first, last=last))
            pool = allocate_pool(source.config, len(layers), num_pages, page_size, dtype)
            self.pools.append(pool.fill_(7.0))
        scrambled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
        self._free: list[int] = scrambled.tolist()

    def row(self, tokens: Sequence[int], room: int) -> Row:
        """A sequence with pages for its tokens and `room` more."""
        count = -(-(len(tokens) + room) // self.page_size)
        return Row(list(tokens), [self._free.pop() for _ in range(count)])

    def step(self, work: Sequence[tuple[Row, int]]) -> None:
        """Computes the next `count` tokens of each row. A row whose tokens are then all computed gets logits."""
        batch, ids, finished = self._batch(work)
        passed = ids
        for stage, pool in zip(self.stages, self.pools, strict=True):
            passed = stage.forward(passed, batch, pool)
        for row, logits in zip(finished, passed, strict=True):
            row.logits.append(logits)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int) -> list[Row]:
        """`num_tokens` greedy tokens for each prompt: prompts in chunks one by one, then all rows together."""
        rows = [self.row(prompt, num_tokens) for prompt in prompts]
        for row in rows:
            while row.done < len(row.tokens):
                self.step([(row, min(chunk, len(row.tokens) - row.done))])
        for _ in range(num_tokens):
            for row in rows:
                row.tokens.append(int(row.logits[-1].argmax()))
            self.step([(row, 1) for row in rows])
        return rows

    def _batch(self, work: Sequence[tuple[Row, int]]) -> tuple[ForwardBatch, Tensor, list[Row]]:
        places = [(row, place) for row, count in work for place in range(row.done, row.done + count)]
        slots = [row.pages[place // self.page_size] * self.page_size + place % self.page_size for row, place in places]
        ends = [index for index, (row, place) in enumerate(places) if place == len(row.tokens) - 1]
        table = torch.zeros(len(work), max(len(row.pages) for row, _ in work), dtype=torch.int64)
        for index, (row, count) in enumerate(work):
            row.done += count
            used = row.pages[: -(-row.done // self.page_size)]
            table[index, : len(used)] = torch.tensor(used)
        batch = ForwardBatch(
            positions=torch.tensor([place for _, place in places]),
            slots=torch.tensor(slots),
            query_lens=tuple(count for _, count in work),
            context_lens=tuple(row.done for row, _ in work),
            page_table=table,
            logit_rows=torch.tensor(ends, dtype=torch.int64),
        )
        ids = torch.tensor([row.tokens[place] for row, place in places])
        return batch, ids, [places[index][0] for index in ends]
