"""The life of an instance.

starting --ready--> serving --drain--> draining --stop--> stopped
draining --resume--> serving
starting --stop--> stopped
starting, serving, draining --lose--> lost      a process gone, or the heartbeat, or its progress
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from stagemesh.shared.fsm.table import Table


class InstanceState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class InstanceEvent(Enum):
    READY = "ready"
    DRAIN = "drain"
    RESUME = "resume"
    STOP = "stop"
    LOSE = "lose"


_S, _E = InstanceState, InstanceEvent
INSTANCE: Final = Table(
    _S.STARTING,
    {
        (_S.STARTING, _E.READY): _S.SERVING,
        (_S.STARTING, _E.STOP): _S.STOPPED,
        (_S.STARTING, _E.LOSE): _S.LOST,
        (_S.SERVING, _E.DRAIN): _S.DRAINING,
        (_S.SERVING, _E.LOSE): _S.LOST,
        (_S.DRAINING, _E.RESUME): _S.SERVING,
        (_S.DRAINING, _E.STOP): _S.STOPPED,
        (_S.DRAINING, _E.LOSE): _S.LOST,
    },
)
