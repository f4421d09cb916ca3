"""What a server shows, and whom it lets in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from stagemesh.shared.errors import Unauthenticated
from stagemesh.shared.obs.log import Log
from stagemesh.shared.rpc.dial import AUTHORIZATION
from stagemesh.shared.security.keys import Client, KeyRing
from stagemesh.shared.security.material import Material, Pems

LOG_INTERVAL_S: Final = 1.0
_OPEN: Final = "/grpc.health.v1.Health/"  # a load balancer has no key, and learns nothing more


@dataclass(frozen=True, slots=True)
class Listening:
    """With `material` a TCP port takes TLS only; with `clients` only from those whose certificates that material's `ca`
    has signed."""

    material: Material | None = None
    clients: bool = False

    def add_port(self, server: Any, address: str) -> int:
        """The port. Raises RuntimeError if the address is taken."""
        if self.material is None or address.startswith("unix:"):
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _credentials(self.material, clients=self.clients)))


PLAIN_PORT: Final = Listening()


def _credentials(material: Material, *, clients: bool) -> grpc.ServerCredentials:
    """Each new connection gets the certificate of that moment; those there are stay as they are."""
    used = material.current()

    def latest() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        pems = material.current()
        if pems is used:
            return None
        used = pems
        return _configuration(pems)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), latest, clients)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca or None)


class Callers:
    """Who calls, by API key. Without a key ring everybody is let in, under no name."""

    def __init__(self, keys: KeyRing | None, log: Log) -> None:
        self._keys, self._log = keys, log
        self.num_refused = 0
        self._unsaid: Counter[str] = Counter()
        self._said_s = float("-inf")

    @property
    def is_checked(self) -> bool:
        return self._keys is not None

    @property
    def clients(self) -> Mapping[str, Client]:
        return {} if self._keys is None else self._keys.clients

    def caller(self, context: Any) -> Client:
        """Of a call that was let in: its key may have been taken away since, which raises Unauthenticated."""
        if self._keys is None:
            return ANYBODY
        return self._keys.authenticate(_authorization(context.invocation_metadata()))

    def check(self, metadata: Any) -> None:
        """Raises Unauthenticated."""
        if self._keys is not None:
            self._keys.authenticate(_authorization(metadata))

    def refused(self, error: Unauthenticated, rpc: str, peer: str) -> None:
        """Said once a second at most: whoever knocks without a key does not fill the log."""
        self.num_refused += 1
        self._unsaid[str(error)] += 1
        if (now_s := time.monotonic()) - self._said_s >= LOG_INTERVAL_S:
            for reason, count in self._unsaid.items():
                self._log.warning("calls are refused", reason=reason, calls=count, rpc=rpc, peer=peer)
            self._unsaid.clear()
            self._said_s = now_s


ANYBODY: Final = Client("", ())


def header(metadata: Any, name: str) -> str:
    """The value that a caller gave, once; else nothing."""
    found = [value for key, value in metadata or () if key == name]
    return str(found[0]) if len(found) == 1 else ""


def _authorization(metadata: Any) -> str | None:
    return header(metadata, AUTHORIZATION) or None


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the library has no types
    """Lets a call through to its handler, or ends it before its message is read."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        if not call.method.startswith(_OPEN):
            try:
                self._callers.check(call.invocation_metadata)
            except Unauthenticated as error:
                return self._refusal(error, call.method)
        return await continuation(call)

    def _refusal(self, error: Unauthenticated, rpc: str) -> Any:
        async def refuse(messages: Any, context: Any) -> None:
            self._callers.refused(error, rpc, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

        # whatever the method is: a handler of a stream is called before any message has come
        return grpc.stream_stream_rpc_method_handler(refuse)
