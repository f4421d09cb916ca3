"""What the state machines share: a table of legal moves, and the error for all others."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from stagemesh.shared.errors import Bug

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalTransition(Bug):
    """An event that the table has no entry for: a bug of ours, or a peer that breaks the protocol."""

    def __init__(self, subject: str, state: Enum, event: Enum) -> None:
        super().__init__(f"{subject}: no transition for {event.value} in {state.value}")
        self.subject, self.state, self.event = subject, state, event


class Table(Generic[S, E]):
    """A literal `(state, event) -> state` with its initial state. Terminal states are those with no way out."""

    def __init__(self, initial: S, moves: Mapping[tuple[S, E], S]) -> None:
        self.initial, self.moves = initial, dict(moves)
        self.terminal = frozenset(moves.values()) - frozenset(state for state, _ in moves)

    def advance(self, subject: str, state: S, event: E) -> S:
        """The state after `event`. Raises IllegalTransition, naming `subject`, where the table has no entry."""
        try:
            return self.moves[state, event]
        except KeyError:
            raise IllegalTransition(subject, state, event) from None
