"""Stopping a local mesh wave by wave, as a pure schedule: it says whom to signal, the supervisor does it.

wave 0 SIGTERM --all gone--> wave 1 SIGTERM --all gone--> ... --> over
   |
   +--deadline--> SIGKILL those that are left, once
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

CLOSE_GRACE_S: Final = 5.0
"""What closing may take after a service's own drain."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Process `name` is to end in wave `wave`, within `timeout_s` of that wave's SIGTERM."""

    name: str
    wave: int
    timeout_s: float


class DrainSchedule:
    """Call `step` at the start, after every exit, and at `deadline`."""

    def __init__(self, stops: Iterable[Stop]) -> None:
        self._left = sorted(stops, key=lambda stop: stop.wave)
        self._wave: tuple[Stop, ...] = ()
        self._killed: set[str] = set()
        self._started_at = 0.0

    @property
    def deadline(self) -> float | None:
        """When somebody's time is up next, on the clock of `step`; None if there is nobody to wait for."""
        pending = [stop.timeout_s for stop in self._wave if stop.name not in self._killed]
        return self._started_at + min(pending) if pending else None

    def step(self, now: float, alive: frozenset[str]) -> list[tuple[str, signal.Signals]]:
        """Whom to send which signal now. `alive` are the names not reaped yet."""
        self._wave = tuple(stop for stop in self._wave if stop.name in alive)
        self._left = [stop for stop in self._left if stop.name in alive]
        if not self._wave and self._left:
            return self._begin(now)
        return self._kill([stop for stop in self._wave if now >= self._started_at + stop.timeout_s])

    def cut_off(self) -> list[tuple[str, signal.Signals]]:
        """No more patience: SIGKILL for everyone that has not had it."""
        signals = self._kill([*self._wave, *self._left])
        self._wave, self._left = (*self._wave, *self._left), []
        return signals

    def _begin(self, now: float) -> list[tuple[str, signal.Signals]]:
        number = self._left[0].wave
        self._wave = tuple(stop for stop in self._left if stop.wave == number)
        self._left = [stop for stop in self._left if stop.wave != number]
        self._started_at = now
        return [(stop.name, signal.SIGTERM) for stop in self._wave]

    def _kill(self, stops: Iterable[Stop]) -> list[tuple[str, signal.Signals]]:
        names = [stop.name for stop in stops if stop.name not in self._killed]
        self._killed.update(names)
        return [(name, signal.SIGKILL) for name in names]
