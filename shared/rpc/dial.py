"""How this process connects to others: with TLS or without, with which certificate, with which API key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from stagemesh.shared.rpc.options import CHANNEL_OPTIONS
from stagemesh.shared.security.material import Material, Pems

AUTHORIZATION: Final = "authorization"


@dataclass(frozen=True, slots=True)
class Dial:
    """Without `material` nothing is encrypted; unix sockets never are. `server_name` is what the server's certificate
    must be for, if that is not the host of its address."""

    material: Material | None = None
    server_name: str = ""
    api_key: str = field(default="", repr=False)

    def pems(self, address: str) -> Pems | None:
        """What a new connection to `address` is made with; None if it is plain."""
        return None if self.material is None or address.startswith("unix:") else self.material.current()

    def connect(self, address: str, pems: Pems | None) -> grpc.aio.Channel:
        if pems is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(pems.ca or None, pems.key or None, pems.cert or None)
        named = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *named))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return ((AUTHORIZATION, f"Bearer {self.api_key}"),) if self.api_key else ()


PLAIN: Final = Dial()


class Wire:
    """A channel made with one version of the material, and what still runs over it."""

    def __init__(self, channel: grpc.aio.Channel, pems: Pems | None) -> None:
        self.channel, self.pems = channel, pems
        self.methods: dict[str, Any] = {}
        self.num_calls = 0
