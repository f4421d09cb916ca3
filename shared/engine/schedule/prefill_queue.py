"""Prompts that have not started, in the order in which they are to: who is asked for, who may start."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter

from stagemesh.shared.engine.schedule.prefill_state import PrefillActions, PrefillSequence

_order = attrgetter("order")


class PromptQueue:
    """Sorted by `order`, of which no two are alike. What it says of `groups` concerns prompts with a ticket only."""

    def __init__(self) -> None:
        self._prompts: list[PrefillSequence] = []
        self._groups: Counter[str] = Counter()

    def __iter__(self) -> Iterator[PrefillSequence]:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, sequence: PrefillSequence) -> None:
        insort(self._prompts, sequence, key=_order)
        if sequence.ticket_id:
            self._groups[sequence.group] += 1

    def discard(self, sequence: PrefillSequence) -> None:
        """Removes it if it is here."""
        at = bisect_left(self._prompts, sequence.order, key=_order)
        if at == len(self._prompts) or self._prompts[at] is not sequence:
            return
        del self._prompts[at]
        if sequence.ticket_id:
            self._groups[sequence.group] -= 1
            if not self._groups[sequence.group]:
                del self._groups[sequence.group]

    def next_of_each_group(self, fewest: int, tokens: int) -> Iterator[PrefillSequence]:
        """In order, of each group the prompts that are to start next: `tokens` tokens to compute, and at least `fewest`
        prompts. What it expects of a prompt counts after the caller has seen it."""
        seen: dict[str, tuple[int, int]] = {}
        open_groups = set(self._groups)
        for sequence in self._prompts:
            if not open_groups:
                return
            if not sequence.ticket_id or (group := sequence.group) not in open_groups:
                continue
            yield sequence
            count, expected = seen.get(group, (0, 0))
            count, expected = seen[group] = (count + 1, expected + sequence.expected)
            if (count >= fewest and expected >= tokens) or count == self._groups[group]:
                open_groups.remove(group)


class Lineup:
    """All prompts that have not started. `look_up` notes how much of a prompt is cached."""

    def __init__(self, look_up: Callable[[PrefillSequence], None], *, reserve_ahead: int, chunk_size: int) -> None:
        self._look_up, self._reserve_ahead, self._chunk_size = look_up, reserve_ahead, chunk_size
        self._waiting, self._startable = PromptQueue(), PromptQueue()  # the latter are among the former, as are
        self._reserved = PromptQueue()  # those that have their pages there

    def __iter__(self) -> Iterator[PrefillSequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: PrefillSequence) -> None:
        self._look_up(sequence)
        self._waiting.add(sequence)
        if sequence.startable:
            self._startable.add(sequence)

    def reserved(self, sequence: PrefillSequence) -> None:
        """It has its pages on the decode side."""
        self._reserved.add(sequence)

    def taken_back(self, sequence: PrefillSequence) -> None:
        """It has them no more."""
        self._reserved.discard(sequence)

    def filled(self, sequence: PrefillSequence) -> None:
        """The broker knows that writes may begin."""
        if not sequence.filled:
            sequence.filled = True
            self._startable.add(sequence)

    def discard(self, sequence: PrefillSequence) -> None:
        """It has started, or never will."""
        self._waiting.discard(sequence)
        self._startable.discard(sequence)
        self._reserved.discard(sequence)

    @property
    def num_coming(self) -> int:
        """Those that may not start yet."""
        return len(self._waiting) - len(self._startable)

    def first(self, count: int) -> list[PrefillSequence]:
        """The next that may start, `count` at most."""
        return list(islice(self._startable, max(0, count)))

    def ask_ahead(self, actions: PrefillActions) -> None:
        """Asks for pages for the prompts that start next: two chunks' worth for each decode instance, and at least
        `reserve_ahead` of them. Announces the writes of those that have their pages, two chunks' worth at a time,
        whoever has come before them since they asked: those may be waiting for the very pages that these hold."""
        for sequence in self._waiting.next_of_each_group(self._reserve_ahead, 2 * self._chunk_size):
            if not sequence.asked:
                self._look_up(sequence)
                sequence.asked = True
                sequence.asked_s = sequence.asked_s or time.monotonic()
                actions.reserve.append(sequence.ticket_id)
        ahead = 0  # tokens of those before
        for sequence in self._reserved:
            if ahead >= 2 * self._chunk_size:
                break
            if not sequence.announced:
                sequence.announced = True
                actions.fill.append(sequence.ticket_id)
            ahead += sequence.expected
