"""What a prefill instance's next chunk holds, and whether it is issued now."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stagemesh.shared.core.commands import SAMPLE, TELL, Command, Ints, Join
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.schedule.chunk_size import ChunkSize
from stagemesh.shared.engine.schedule.prefill_pages import PromptPages
from stagemesh.shared.engine.schedule.prefill_queue import Lineup
from stagemesh.shared.engine.schedule.prefill_state import MAX_TOLD, PrefillSequence
from stagemesh.shared.engine.schedule.stats import PrefillStats
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class PrefillChunks:
    """Owns the prompts that have `started`, by handle, in the order of their start; they hold pages. At most
    `max_sequences` of them, and `pp_size` chunks and `run_ahead` more out at once."""

    def __init__(
        self,
        pages: PromptPages,
        issuer: Issuer,
        lineup: Lineup,
        stats: PrefillStats,
        size: ChunkSize,
        *,
        max_sequences: int,
        pp_size: int,
        run_ahead: int,
    ) -> None:
        self._pages, self._issuer, self._lineup, self._stats = pages, issuer, lineup, stats
        self._size, self._max_sequences = size, max_sequences
        self._pp_size, self._max_steps = pp_size, pp_size + run_ahead
        self.started: dict[int, PrefillSequence] = {}

    def issue(self) -> Iterator[Command]:
        """As many as may be out."""
        out = len(self._issuer.outstanding)
        if out < self._max_steps:
            self._size.update(self.expected(), is_empty=not out)
        while self._may_issue() and (command := self._next_chunk()) is not None:
            yield command

    def _may_issue(self) -> bool:
        """A chunk that runs ahead of the stages waits until it is full, if more prompts are coming that may fill it."""
        out = len(self._issuer.outstanding)
        if out < self._pp_size or out >= self._max_steps:
            return out < self._max_steps
        if not self._lineup.num_coming:
            return True
        return sum(sequence.expected for sequence in self._candidates()) >= self._size.tokens

    def _next_chunk(self) -> Command | None:
        """Prompts under way first, then new ones, as many tokens as a chunk holds."""
        budget, rows, tokens = self._size.tokens, list[tuple[int, ...]](), list[Ints]()
        telling = MAX_TOLD  # tokens whose logits are all computed
        for sequence in self._candidates():
            if not budget:
                break
            if not sequence.pages and not self._start(sequence):
                break  # no pages: nobody behind it starts before it does
            start, count = sequence.issued, min(budget, sequence.remaining)
            if sequence.tells_prompt:
                if not telling:
                    break
                count = min(count, telling)
                telling -= count
            sequence.issued += count
            sequence.in_flight += 1
            self._pages.grow(sequence)
            flags = (0 if sequence.remaining else SAMPLE) | (TELL if sequence.tells_prompt else 0)
            rows.append((sequence.handle, start, count, 0, 0, flags))
            tokens.append(sequence.tokens[start : start + count])
            budget -= count
        if not rows:
            return None
        self._stats.chunk_tokens.record(self._size.tokens - budget)
        return self._issuer.issue_step(0, np.array(rows, dtype=np.int64), np.concatenate(tokens))

    def _candidates(self) -> Iterator[PrefillSequence]:
        yield from [s for s in self.started.values() if s.remaining and not s.over]
        yield from self._lineup.first(self._max_sequences - len(self.started))

    def expected(self) -> Iterator[int]:
        """Tokens still to be computed, of each prompt, as far as that can be known."""
        yield from (s.expected for s in self.started.values() if s.state is SequenceState.RUNNING)
        yield from (s.expected for s in self._lineup)

    def _start(self, sequence: PrefillSequence) -> bool:
        if not self._pages.take(sequence):
            return False
        self._lineup.discard(sequence)
        self.started[sequence.handle] = sequence
        self._stats.prompt_tokens += len(sequence.tokens)
        self._stats.cached_tokens += sequence.cached
        sequence.move(SequenceEvent.START)
        self._issuer.join(
            Join(sequence.handle, sequence.request, sequence.sampling, sequence.send, len(sequence.tokens))
        )
        self._issuer.add_pages(sequence.handle, sequence.pages)
        if sequence.send is not None:
            sequence.unsettled = set(range(self._pp_size))
        return True
