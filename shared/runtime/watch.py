"""The supervisor's eye on its children: who is stopped, who stands still, who does not get ready.

forked --the kernel says: stopped--> for as long as peers wait for a sign of life --> killed
   |--not ready, and no sign of work (starting.py) --> killed
   `--ready --WATCHDOG=1, or its greeting (NATS)--> heard ... --silent, though it had a core--> killed

Who is killed is reaped, and started again as any. That one is stopped is a fact, so it is acted on soon; silence may be
that of a busy host, so it takes longer.
"""

from __future__ import annotations

import selectors
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.nats_probe import NatsProbe
from stagemesh.shared.runtime.nats_server import NATS_SPEC
from stagemesh.shared.runtime.options import Limits
from stagemesh.shared.runtime.procfs import waited_s, work_of
from stagemesh.shared.runtime.restarts import group_of
from stagemesh.shared.runtime.starting import Starting
from stagemesh.shared.runtime.stopped import stops
from stagemesh.shared.runtime.watchdog import Watchdog

PROBES: Final = 4  # of the NATS server, in the time of the watchdog


@dataclass(frozen=True, slots=True)
class Stuck:
    """To be killed, and why."""

    name: str
    why: str


class Watch:
    """Of all children."""

    def __init__(self, children: Children, selector: selectors.BaseSelector, limits: Limits) -> None:
        self._children, self._limits = children, limits
        self._progress = Watchdog(limits.watchdog_s, waited_s)
        self._stops = Watchdog(limits.stopped_s)
        self._starting = Starting(limits.quiet_s, limits.start_s, work_of)
        self._stopped: set[int] = set()  # pids
        self._probe = NatsProbe(selector, limits.watchdog_s / PROBES, self._on_greeting)
        self._now_s = 0.0

    @property
    def fds(self) -> list[int]:
        """What a forked child must not keep open."""
        return self._probe.fds

    def take(self, child: Child, lines: Mapping[str, str], now_s: float) -> None:
        """What a child has said."""
        if not child.is_ready:
            self._starting.heard(child.pid, now_s)
        match lines.get("WATCHDOG"):
            case "1":
                self._progress.heard(child.pid, now_s)
            case "trigger":
                self._progress.trigger(child.pid)

    def look(self, now_s: float, falling: Collection[str]) -> list[Stuck]:
        """Who is to be killed now. A member of a group that is `falling` could only leave by itself if it ran."""
        self._now_s = now_s
        ready = {child.pid: child for child in self._children if child.is_alive and child.is_ready}
        starting = {child.pid: child for child in self._children if child.is_alive and not child.is_ready}
        nats = self._children.get(NATS_SPEC.name)
        if nats is not None and nats.pid in ready:
            self._probe.tick(now_s, nats.address)
        stuck = self.stopped(now_s, falling)
        why = f"has made no progress for {self._limits.watchdog_s:g} s"
        stuck += [Stuck(ready[pid].spec.name, why) for pid in self._progress.overdue(now_s, ready)]
        for pid, idle in self._starting.overdue(now_s, starting).items():
            stuck.append(Stuck(starting[pid].spec.name, f"is not ready ({starting[pid].status}) and {idle}"))
        return stuck

    def stopped(self, now_s: float, falling: Collection[str]) -> list[Stuck]:
        """Who is to be killed now because it is stopped: all that matters of those that are told to end."""
        alive = {child.pid: child for child in self._children if child.is_alive}
        for pid in alive:
            for is_stopped in stops(pid):
                if is_stopped:
                    self._stops.heard(pid, now_s)  # however often it has gone on before: its time begins now
                (self._stopped.add if is_stopped else self._stopped.discard)(pid)
        self._stopped.intersection_update(alive)
        for pid in self._stopped:
            if group_of(alive[pid].spec) in falling:
                self._stops.trigger(pid)
        return [Stuck(alive[pid].spec.name, "is stopped") for pid in self._stops.overdue(now_s, self._stopped)]

    @property
    def stopped_deadline_s(self) -> float | None:
        """When to look for stopped ones again, whatever happens."""
        return self._stops.deadline_s

    def deadline_s(self) -> float | None:
        """When to look again, whatever happens."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        probe_s = None if self._children.get(NATS_SPEC.name) is None else self._probe.deadline_s
        for at in (self._progress.deadline_s, self._stops.deadline_s, self._starting.deadline_s, probe_s):
            if at is not None:
                yield at

    def close(self) -> None:
        self._probe.close()

    def _on_greeting(self) -> None:
        nats = self._children.get(NATS_SPEC.name)
        if nats is not None:
            self._progress.heard(nats.pid, self._now_s)
