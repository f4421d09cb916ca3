"""The supervisor's children as a table: forking into it, reaping, signalling, and nobody left at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping

from stagemesh.shared.runtime.child import Child, fork_child
from stagemesh.shared.runtime.plan import ProcessSpec


class Children:
    """By name, in the order they were started."""

    def __init__(self) -> None:
        self._by_name: dict[str, Child] = {}

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._by_name.values()))

    def __getitem__(self, name: str) -> Child:
        return self._by_name[name]

    @property
    def alive(self) -> frozenset[str]:
        """Names of those not reaped yet."""
        return frozenset(name for name, child in self._by_name.items() if child.is_alive)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    @property
    def are_ready(self) -> bool:
        return all(child.is_ready for child in self._by_name.values())

    def get(self, name: str) -> Child | None:
        return self._by_name.get(name)

    def with_pid(self, pid: int) -> Child | None:
        return next((child for child in self if child.pid == pid and child.is_alive), None)

    def fork(
        self, spec: ProcessSpec, run: Callable[[], None], environ: Mapping[str, str], close_fds: Iterable[int]
    ) -> Child:
        """Starts one more; it inherits neither `close_fds` nor the others' outputs."""
        outputs = [child.output_fd for child in self if child.output_fd is not None]
        child = fork_child(spec, run, environ=environ, close_fds=[*outputs, *close_fds])
        self._by_name[spec.name] = child
        return child

    def forget(self, name: str) -> None:
        """One that has been reaped and will not come back."""
        del self._by_name[name]

    def reap(self) -> list[Child]:
        """Those that have ended since the last call."""
        return [child for child in self if child.is_alive and child.reap()]

    def kill_all(self) -> None:
        """The last resort of a supervisor that itself fails; finds nobody alive otherwise."""
        for child in self:
            child.send(signal.SIGKILL)
        for child in self:
            if child.is_alive:
                os.waitpid(child.pid, 0)
            child.close()
