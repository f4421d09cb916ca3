"""The supervisor's reports that all processes of an instance have been reaped: a forked child a report.

a stage --epoch--> noted   ...   the last of its instance is reaped --> a report of that epoch, to the broker
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.exits import describe_exit
from stagemesh.shared.runtime.plan import ProcessSpec

MAX_LINES: Final = 5


class Reports:
    """Their forks are no children of the mesh: they come and go, and nobody waits for them."""

    def __init__(self, children: Children) -> None:
        self._children, self._reporters = children, Children()
        self._epochs: dict[str, int] = {}  # instance -> the last one all of whose processes are reaped
        self._started = 0

    @property
    def fds(self) -> list[int]:
        """What another forked child must not keep open."""
        return [child.output_fd for child in self._reporters if child.output_fd is not None]

    @property
    def epochs(self) -> Mapping[str, int]:
        """What a broker that is started again has to be told once more."""
        return self._epochs

    def ended(self, child: Child) -> int | None:
        """A child has been reaped. The epoch to report of its instance, if it was the last one."""
        instance = child.spec.instance
        stages = [other for other in self._children if instance is not None and other.spec.instance == instance]
        epoch = max((stage.epoch for stage in stages), default=0)
        if instance is None or any(stage.is_alive for stage in stages) or epoch <= self._epochs.get(instance, 0):
            return None
        self._epochs[instance] = epoch
        return epoch

    def fork(
        self, instance: str, run: Callable[[], None], environ: Mapping[str, str], close_fds: Iterable[int]
    ) -> None:
        self._started += 1
        spec = ProcessSpec(f"reaped-{self._started}", "broker", instance, None, "")
        outputs = [child.output_fd for child in self._children if child.output_fd is not None]
        self._reporters.fork(spec, run, environ, [*outputs, *close_fds])

    def reap(self) -> list[str]:
        """What is worth telling of those that have ended: a report that was not taken."""
        said: list[str] = []
        for child in self._reporters.reap():
            lines = child.read_lines()[-MAX_LINES:]
            child.close()
            self._reporters.forget(child.spec.name)
            if child.wait_status:
                said += [f"the report that {child.spec.instance} is reaped {describe_exit(child.wait_status)}", *lines]
        return said

    def close(self) -> None:
        self._reporters.kill_all()
