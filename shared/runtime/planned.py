"""Restarts that are no falls: an operator asks for one, and is answered when the group is ready, or a group itself
wants it.

asked --SIGTERM to its members--> they drain and are reaped --> started again --ready--> answered
  `--not serving, unknown, or under way already: refused
a member says that its group ends ----------^
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.control import Connection, ControlReply, ControlRequest, ControlSocket, GroupInfo
from stagemesh.shared.runtime.notify import AGAIN
from stagemesh.shared.runtime.restarts import Restarts, group_of


@dataclass(slots=True)
class _Asked:
    """By whom, and what did not go well so far."""

    connection: Connection
    troubles: list[str] = field(default_factory=list)


class Planned:
    """`refusal` says why nothing can be restarted now, or nothing; `stop_timeout_s` is what a child's end may take."""

    def __init__(
        self,
        control: ControlSocket,
        children: Children,
        restarts: Restarts,
        *,
        refusal: Callable[[], str],
        stop_timeout_s: Callable[[Child], float],
    ) -> None:
        self._control, self._children, self._restarts = control, children, restarts
        self._refusal, self._stop_timeout_s = refusal, stop_timeout_s
        self._asked: dict[str, _Asked] = {}
        self._by_themselves: set[str] = set()
        control.on_request = self._on_request

    def _on_request(self, connection: Connection, request: ControlRequest) -> None:
        why = self._refusal()
        if not why and request.command == "groups":
            router = self._children["router"].address
            self._control.reply(connection, ControlReply(groups=self._groups(), router=router))
        elif not why:
            why = self._begin(connection, request.group)
        if why:
            self._control.reply(connection, ControlReply(error=why))

    def _groups(self) -> tuple[GroupInfo, ...]:
        roles = {group_of(child.spec): child.spec.service for child in self._children}
        return tuple(GroupInfo(name, role) for name, role in roles.items())

    def _begin(self, connection: Connection, group: str) -> str:
        """Why not, or nothing."""
        members = [child for child in self._children if group_of(child.spec) == group]
        if not members:
            return f"group: nothing is named {group!r}; there are {', '.join(g.name for g in self._groups())}"
        now_s = time.monotonic()
        limit_s = max(self._stop_timeout_s(child) for child in members)
        if not all(child.is_ready for child in members) or not self._restarts.planned(group, now_s, limit_s):
            return f"{group} is being started again already"
        self._asked[group] = _Asked(connection)
        for child in members:
            child.send(signal.SIGTERM)
        return ""

    def hear(self, child: Child, lines: Mapping[str, str]) -> Iterator[str]:
        """Takes in that a child's group ends by itself; gives what is worth telling people."""
        why, group = lines.get(AGAIN), group_of(child.spec)
        if why is None or self._refusal():
            return
        limit_s = max(self._stop_timeout_s(other) for other in self._children if group_of(other.spec) == group)
        if self._restarts.planned(group, time.monotonic(), limit_s):
            self._by_themselves.add(group)
            yield f"{group} ends to be started again: {why}"

    def ended(self, child: Child, said: str) -> bool:
        """True if its end was asked for, or announced, and went well."""
        group = group_of(child.spec)
        asked = self._asked.get(group)
        if (asked is None and group not in self._by_themselves) or child.wait_status is None:
            return False
        status = child.wait_status
        well = status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM)
        if not well and asked is not None:
            asked.troubles.append(said)
        return well

    def back(self, group: str) -> None:
        """It has been started again and is ready."""
        self._by_themselves.discard(group)
        asked = self._asked.pop(group, None)
        if asked is not None:
            epoch = max(child.epoch for child in self._children if group_of(child.spec) == group)
            start = self._restarts.counts[group] + 1
            reply = ControlReply(start=start, epoch=epoch, troubles=tuple(asked.troubles))
            self._control.reply(asked.connection, reply)
