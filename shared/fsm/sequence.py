"""The life of a sequence inside an instance.

waiting --reserve--> reserved --start--> running --finish--> finished
waiting --start--> running                     a prompt whose KV goes nowhere (one token asked for)
reserved --unreserve--> waiting                its pages are wanted elsewhere before anybody has written to them
running --retract--> retracted --resume--> running
retracted --finish--> finished                 by a result that was on its way when it was retracted
waiting, reserved, running, retracted --abort--> aborted
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from stagemesh.shared.fsm.table import Table


class SequenceState(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    RETRACTED = "retracted"
    FINISHED = "finished"
    ABORTED = "aborted"


class SequenceEvent(Enum):
    RESERVE = "reserve"
    UNRESERVE = "unreserve"
    START = "start"
    RETRACT = "retract"
    RESUME = "resume"
    FINISH = "finish"
    ABORT = "abort"


_S, _E = SequenceState, SequenceEvent
SEQUENCE: Final = Table(
    _S.WAITING,
    {
        (_S.WAITING, _E.RESERVE): _S.RESERVED,
        (_S.WAITING, _E.START): _S.RUNNING,
        (_S.WAITING, _E.ABORT): _S.ABORTED,
        (_S.RESERVED, _E.UNRESERVE): _S.WAITING,
        (_S.RESERVED, _E.START): _S.RUNNING,
        (_S.RESERVED, _E.ABORT): _S.ABORTED,
        (_S.RUNNING, _E.RETRACT): _S.RETRACTED,
        (_S.RUNNING, _E.FINISH): _S.FINISHED,
        (_S.RUNNING, _E.ABORT): _S.ABORTED,
        (_S.RETRACTED, _E.RESUME): _S.RUNNING,
        (_S.RETRACTED, _E.FINISH): _S.FINISHED,
        (_S.RETRACTED, _E.ABORT): _S.ABORTED,
    },
)
