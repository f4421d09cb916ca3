"""Prompts that wait: in order whatever comes and goes, and asked for a few of each group at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.prefill_queue import Lineup, PromptQueue
from stagemesh.shared.engine.schedule.prefill_state import PrefillActions, PrefillSequence, start_order
from stagemesh.shared.fsm.sequence import SequenceEvent

WAITING = st.tuples(st.integers(1, 20), st.sampled_from("def"), st.integers(0, 5), st.integers(0, 20), st.booleans())
"""Tokens, group, seconds of its arrival, tokens that are cached, whether it has a ticket."""


def sequence_of(handle: int, tokens: int, group: str, arrived_s: int, cached: int, ticket: bool) -> PrefillSequence:
    order = start_order(arrived_s, handle, priority=0, ageing_s=1.0, recompute=False)
    ids, ticket_id = np.zeros(tokens, dtype=np.int64), f"t{handle}" if ticket else ""
    sequence = PrefillSequence(
        RequestRef(f"r{handle}", 0), SamplingParams(max_tokens=2), ids, ticket_id, group, handle, arrived_s, order
    )
    sequence.expected_cached = min(cached, tokens - 1)
    return sequence


def next_ones(waiting: list[PrefillSequence], fewest: int, tokens: int) -> list[PrefillSequence]:
    """The same, told the long way."""
    chosen = list[PrefillSequence]()
    for sequence in (s for s in waiting if s.ticket_id):
        before = [s for s in chosen if s.group == sequence.group]
        if len(before) < fewest or sum(s.expected for s in before) < tokens:
            chosen.append(sequence)
    return chosen


@given(st.lists(WAITING, max_size=30), st.data(), st.integers(1, 4), st.integers(0, 40))
def test_a_queue_is_in_order_and_names_the_next_of_each_group(
    waiting: list[tuple[int, str, int, int, bool]], data: st.DataObject, fewest: int, tokens: int
) -> None:
    queue, members = PromptQueue(), list[PrefillSequence]()
    for handle, of in enumerate(waiting):
        members.append(sequence_of(handle, *of))
        queue.add(members[-1])
        if data.draw(st.booleans()):
            gone = members.pop(data.draw(st.integers(0, len(members) - 1)))
            queue.discard(gone)
            queue.discard(gone)
    members.sort(key=lambda sequence: sequence.order)
    assert list(queue) == members
    assert len(queue) == len(members)
    assert queue._groups == {g: n for g in "def" if (n := sum(bool(s.ticket_id) and s.group == g for s in members))}
    assert list(queue.next_of_each_group(fewest, tokens)) == next_ones(members, fewest, tokens)


def test_only_those_whose_writes_are_announced_or_that_need_none_may_start() -> None:
    lineup, actions = Lineup(lambda _: None, reserve_ahead=2, chunk_size=8), PrefillActions()
    first, second, free = (sequence_of(n, 10, "d", n, 0, ticket=n < 2) for n in range(3))
    for sequence in (free, second, first):
        lineup.add(sequence)
    assert lineup.first(3) == [free]
    for _ in range(2):
        lineup.ask_ahead(actions)
    assert (actions.reserve, actions.fill) == (["t0", "t1"], [])
    second.move(SequenceEvent.RESERVE)
    lineup.reserved(second)
    for _ in range(2):
        lineup.ask_ahead(actions)
    assert actions.fill == ["t1"]
    for _ in range(2):
        lineup.filled(second)
    assert lineup.first(3) == [second, free]
    assert lineup.first(1) == [second]
    assert lineup.first(-1) == []
    lineup.discard(second)
    assert (lineup.first(3), list(lineup)) == ([free], [first, free])
