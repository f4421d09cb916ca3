"""Who is meant: a request's attempt, an instance's epoch. Late messages of an older one are dropped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RequestRef:
    """One attempt of one request."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True, order=True)
class InstanceRef:
    """One life of an instance: a restart has a new epoch."""

    name: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.name}@{self.epoch}"
