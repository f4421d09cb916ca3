"""What is used of NIXL, in the library's words, and what travels inside of a published key."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Final, Protocol

from stagemesh.shared.errors import ProtocolViolation

MEMORIES: Final = ("DRAM", "VRAM")


class Agent(Protocol):
    """A descriptor is (address, length, device[, tag]); errors are exceptions."""

    def register_memory(self, descriptors: list[tuple[int, int, int, str]], memory: str) -> Any: ...
    def deregister_memory(self, registered: Any) -> None: ...
    def get_partial_agent_metadata(self, registered: Any, with_connection: bool, backends: list[str]) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, name: str) -> None: ...
    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], memory: str) -> Any: ...
    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory is: DRAM, or VRAM of the process's GPU number `device`."""

    memory: str = "DRAM"
    device: int = 0


@dataclass(frozen=True, slots=True)
class NixlKey:
    """What peers need of a region: the agent's `name`, `HOST#INCARNATION`; the `port` at which it listens there, 0 if
    that is not known; where the region is; and the metadata of both in the library's form, about half a KB."""

    name: str
    port: int
    place: Place
    metadata: bytes

    @property
    def host(self) -> str:
        return self.name.rpartition("#")[0]

    def __str__(self) -> str:
        place = f"{self.place.memory}{self.place.device}"
        return f"{self.name}:{self.port}:{place}:{base64.b64encode(self.metadata).decode()}"


def parse_key(endpoint: str) -> NixlKey:
    """The reverse of `str`. Raises ProtocolViolation."""
    name, port, place, encoded = ["", "", "", *endpoint.rsplit(":", 3)][-4:]  # the name may have colons
    memory, device = place[:4], place[4:]
    try:
        metadata = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        metadata = b""
    if not (is_number(port) and int(port) < 65536 and memory in MEMORIES and is_number(device) and name and metadata):
        raise ProtocolViolation(f"not a NIXL endpoint: {endpoint[:80]!r}")
    return NixlKey(name, int(port), Place(memory, int(device)), metadata)


def is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= 5
