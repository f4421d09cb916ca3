"""The health of a stage is its progress: it tells the others how far it is, and ends when it stands still.

every 0.5 s: pulse --round the ring--> head --report--> broker      a neighbour that hears no pulse takes it for lost
every 0.25 s: a step that has run far too long --> not serving, WATCHDOG=trigger, and the service fails
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from stagemesh.shared.errors import Bug
from stagemesh.shared.obs.log import Log
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.stage.node import StageNode

PULSE_S: Final = 0.5
LOOK_S: Final = 0.25


class Health:
    """Runs two children of the stage. `on_stuck` says to whoever asks that the stage serves no more."""

    def __init__(self, node: StageNode, notifier: Notifier, on_stuck: Callable[[], Awaitable[None]], log: Log) -> None:
        self._node, self._notifier, self._on_stuck, self._log = node, notifier, on_stuck, log

    async def pulse(self) -> None:
        """A child of the stage: runs until cancelled."""
        while True:
            self._node.pulse()
            await asyncio.sleep(PULSE_S)

    async def watch(self) -> None:
        """A child of the stage. Raises Bug once its step stands still: whoever started it kills what does not end."""
        clock = self._node.executor.clock
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            if (away_s := now_s - before_s - LOOK_S) > LOOK_S:
                clock.excuse(away_s)
            if reason := clock.overdue(now_s):
                self._log.error("the stage makes no progress", reason=reason)
                await self._on_stuck()
                self._notifier.trigger()
                raise Bug(f"the stage makes no progress: {reason}")
