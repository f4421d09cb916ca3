"""The supervisor's eye on its children: who has stood still for too long, and who is stopped while its group falls.

child --WATCHDOG=1, or its greeting (NATS)--> heard   ...   silent --> killed, then reaped and started again as any
"""

from __future__ import annotations

import selectors
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.nats_probe import NatsProbe
from stagemesh.shared.runtime.nats_server import NATS_SPEC
from stagemesh.shared.runtime.restarts import group_of
from stagemesh.shared.runtime.watchdog import Watchdog

PROBES: Final = 4  # of the NATS server, in the time of the watchdog


@dataclass(frozen=True, slots=True)
class Stuck:
    """To be killed, and why."""

    name: str
    why: str


class Watch:
    """Of all children that are ready."""

    def __init__(self, children: Children, selector: selectors.BaseSelector, timeout_s: float) -> None:
        self._children, self._timeout_s = children, timeout_s
        self._watchdog = Watchdog(timeout_s)
        self._probe = NatsProbe(selector, timeout_s / PROBES, self._on_greeting)
        self._now_s = 0.0

    @property
    def fds(self) -> list[int]:
        """What a forked child must not keep open."""
        return self._probe.fds

    def take(self, child: Child, lines: Mapping[str, str], now_s: float) -> None:
        """What a child has said."""
        match lines.get("WATCHDOG"):
            case "1":
                self._watchdog.heard(child.pid, now_s)
            case "trigger":
                self._watchdog.trigger(child.pid)

    def look(self, now_s: float, falling: Collection[str]) -> list[Stuck]:
        """Who is to be killed now. A member of a group that is `falling` could only leave by itself if it ran."""
        self._now_s = now_s
        watched = {child.pid: child for child in self._children if child.is_alive and child.is_ready}
        nats = self._children.get(NATS_SPEC.name)
        if nats is not None and nats.pid in watched:
            self._probe.tick(now_s, nats.address)
        why = f"has made no progress for {self._timeout_s:g} s"
        stuck = [Stuck(watched[pid].spec.name, why) for pid in self._watchdog.overdue(now_s, watched)]
        for child in self._children:
            if child.is_alive and group_of(child.spec) in falling and is_stopped(child.pid):
                stuck.append(Stuck(child.spec.name, "is stopped"))
        return stuck

    def deadline_s(self) -> float | None:
        """When to look again, whatever happens."""
        probe_s = None if self._children.get(NATS_SPEC.name) is None else self._probe.deadline_s
        return min((at for at in (self._watchdog.deadline_s, probe_s) if at is not None), default=None)

    def close(self) -> None:
        self._probe.close()

    def _on_greeting(self) -> None:
        nats = self._children.get(NATS_SPEC.name)
        if nats is not None:
            self._watchdog.heard(nats.pid, self._now_s)


def is_stopped(pid: int) -> bool:
    """By a signal, or by a debugger. `pid` is a child that is not reaped."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
