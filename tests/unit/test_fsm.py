"""Every pair of the three tables, and their shape."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.instance import INSTANCE, InstanceEvent, InstanceState
from stagemesh.shared.fsm.sequence import SEQUENCE, SequenceEvent, SequenceState
from stagemesh.shared.fsm.table import IllegalTransition, Table
from stagemesh.shared.fsm.ticket import TICKET, TicketEvent, TicketState

MACHINES: dict[str, tuple[Table[Any, Any], type[Enum], type[Enum], set[Enum]]] = {
    "ticket": (TICKET, TicketState, TicketEvent, {TicketState.CLOSED}),
    "sequence": (SEQUENCE, SequenceState, SequenceEvent, {SequenceState.FINISHED, SequenceState.ABORTED}),
    "instance": (INSTANCE, InstanceState, InstanceEvent, {InstanceState.STOPPED, InstanceState.LOST}),
}
NAMES = sorted(MACHINES)


PAIRS = [
    pytest.param(name, state, event, id=f"{name}-{state.value}-{event.value}")
    for name, (_, states, events, _) in MACHINES.items()
    for state in states
    for event in events
]


@pytest.mark.parametrize(("name", "state", "event"), PAIRS)
def test_every_pair_either_moves_as_the_table_says_or_raises(name: str, state: Enum, event: Enum) -> None:
    table = MACHINES[name][0]
    if (state, event) in table.moves:
        assert table.advance("it", state, event) is table.moves[state, event]
        return
    with pytest.raises(IllegalTransition, match=f"^it: no transition for {event.value} in {state.value}$") as caught:
        table.advance("it", state, event)
    assert isinstance(caught.value, Bug)
    assert (caught.value.subject, caught.value.state, caught.value.event) == ("it", state, event)


@pytest.mark.parametrize("name", NAMES)
def test_terminal_states_are_sticky_and_are_those_that_the_design_names(name: str) -> None:
    table, _, _, terminal = MACHINES[name]
    assert table.terminal == terminal
    assert not any(state in terminal for state, _ in table.moves)


@pytest.mark.parametrize("name", NAMES)
def test_every_state_is_reachable_and_every_event_means_something(name: str) -> None:
    table, states, events, _ = MACHINES[name]
    reached, frontier = {table.initial}, [table.initial]
    while frontier:
        here = frontier.pop()
        after = {to for (state, _), to in table.moves.items() if state is here} - reached
        reached |= after
        frontier += after
    assert reached == set(states)
    assert {event for _, event in table.moves} == set(events)


@pytest.mark.parametrize("name", NAMES)
def test_from_every_state_there_is_a_way_to_the_end(name: str) -> None:
    table, states, _, terminal = MACHINES[name]
    ending = set(terminal)
    for _ in states:
        ending |= {state for (state, _), to in table.moves.items() if to in ending}
    assert ending == set(states)


def test_pages_that_may_be_written_to_are_closed_only_through_quiescence() -> None:
    into_closed = {(state, event) for (state, event), to in TICKET.moves.items() if to is TicketState.CLOSED}
    assert (TicketState.FILLING, TicketEvent.FAIL) not in into_closed
    assert {event for state, event in into_closed if state is TicketState.QUIESCING} == {TicketEvent.QUIESCED}
