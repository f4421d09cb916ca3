"""What services around a process that is not ours (NATS server, gateway) have in common."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from contextlib import suppress

from stagemesh.shared.errors import PeerLost
from stagemesh.shared.runtime.silence import LOOK_S, LOOKS
from stagemesh.shared.runtime.stopped import stops


async def end_stopped(process: Process, name: str) -> None:
    """A child of the service: kills a process that a signal has stopped for LOST_AFTER_S, and raises PeerLost. Silence
    alone would have to last longer, since it may be that of a busy host."""
    is_stopped, looks = False, 0
    while looks < LOOKS:
        await asyncio.sleep(LOOK_S)
        if news := list(stops(process.pid)):
            is_stopped, looks = news[-1], 0  # however often it has gone on before
        looks += is_stopped
    with suppress(ProcessLookupError):
        process.kill()
    raise PeerLost(f"{name} is stopped")
