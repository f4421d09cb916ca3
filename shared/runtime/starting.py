"""Who makes no headway before it is ready, as a policy over what the kernel knows of it.

started --pulses, says something, works--> ... --ready--> another's business
            |`--nothing of all that for QUIET_S--> hangs
            `--works, but no word for as long as a whole start may take--> hangs (it goes round in circles)

A start may take minutes, and one that waits for others takes as long as they do: its loop runs, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from stagemesh.shared.runtime.procfs import Work
from stagemesh.shared.runtime.watchdog import Watchdog

QUIET_S: Final = 30.0
"""Long enough for a driver that is initialised, or a file server that stalls, while the loop does not run yet."""
LOOKS: Final = 6  # in QUIET_S: reading /proc costs some milliseconds
BUSY: Final = 0.01
"""The share of a core that is work: threads of libraries that only wait take less than a tenth of that."""
BUSY_BYTES: Final = 1 << 16


class Starting:
    """Of processes that are not ready, by pid. `work_of` measures one."""

    def __init__(self, quiet_s: float, silent_s: float, work_of: Callable[[int], Work]) -> None:
        self._quiet, self._silent = Watchdog(quiet_s), Watchdog(silent_s)
        self._look_s, self._work_of = quiet_s / LOOKS, work_of
        self._quiet_s, self._silent_s = quiet_s, silent_s
        self._work: dict[int, tuple[float, Work]] = {}  # when it was measured

    def heard(self, pid: int, now_s: float) -> None:
        """It has said something."""
        self._quiet.heard(pid, now_s)
        self._silent.heard(pid, now_s)

    def overdue(self, now_s: float, starting: Collection[int]) -> dict[int, str]:
        """Who is to be killed now, and why; each is said once, but for those that are overdue twice."""
        self._work = {pid: work for pid, work in self._work.items() if pid in starting}
        for pid in starting:
            self._measure(pid, now_s)
        idle = f"has done nothing for {self._quiet_s:g} s"
        mute = f"has said nothing for {self._silent_s:g} s"
        silent = dict.fromkeys(self._silent.overdue(now_s, starting), mute)
        return silent | dict.fromkeys(self._quiet.overdue(now_s, starting), idle)

    def _measure(self, pid: int, now_s: float) -> None:
        at_s, before = self._work.get(pid, (float("-inf"), Work()))
        if now_s - at_s < self._look_s:
            return
        work = self._work_of(pid)
        self._work[pid] = now_s, work
        works = work.active_s - before.active_s >= BUSY * (now_s - at_s)
        if works or work.read_bytes - before.read_bytes >= BUSY_BYTES:
            self._quiet.heard(pid, now_s)

    @property
    def deadline_s(self) -> float | None:
        """When to look again, whatever happens."""
        looks = [at_s + self._look_s for at_s, _ in self._work.values()]
        return min(
            (at for at in (*looks, self._quiet.deadline_s, self._silent.deadline_s) if at is not None), default=None
        )
