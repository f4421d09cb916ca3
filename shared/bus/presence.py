"""Presence on the bus: who joined and who left, as JSON for people and tools. Liveness is not decided by it."""

from __future__ import annotations

from enum import Enum

import msgspec

from stagemesh.shared.bus.base import Bus
from stagemesh.shared.errors import ProtocolViolation


class PresenceEvent(Enum):
    JOINED = "joined"
    LEFT = "left"


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is an instance, or a service that has none, such as `broker`."""

    event: PresenceEvent
    mesh: str
    name: str
    role: str
    epoch: int
    address: str


def presence_subject(mesh: str, name: str) -> str:
    return f"stagemesh.events.{mesh}.{name}"


def announce(bus: Bus, presence: Presence) -> None:
    """Publishes it; never waits."""
    bus.publish(presence_subject(presence.mesh, presence.name), msgspec.json.encode(presence))


def read_presence(payload: bytes) -> Presence:
    """Raises ProtocolViolation for anything else."""
    try:
        return msgspec.json.decode(payload, type=Presence)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no presence: {error}") from None
