"""A finding of the doctor: what it looked at, what it saw, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is empty where nothing needs to be done."""

    subject: str
    state: State
    seen: str
    remedy: str = ""


def ok(subject: str, seen: str) -> Finding:
    return Finding(subject, State.OK, seen)


def warn(subject: str, seen: str, remedy: str) -> Finding:
    """It runs, but not as well or not as safely as it could."""
    return Finding(subject, State.WARN, seen, remedy)


def fail(subject: str, seen: str, remedy: str) -> Finding:
    """It cannot run like this."""
    return Finding(subject, State.FAIL, seen, remedy)
