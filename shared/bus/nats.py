"""The bus over NATS: core messages for events, one JetStream key-value bucket for epochs.

connecting --> connected <--> reconnecting (for ever) --> closed

All of nats-py's errors become Retryable here, or a count where nobody waits for an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.kv import KeyValue

from stagemesh.shared.bus.access import FIELD, NOBODY, BusAccess
from stagemesh.shared.bus.base import BusStats, Handler, Watcher
from stagemesh.shared.bus.outbox import MAX_QUEUED, Outbox
from stagemesh.shared.bus.roles import EPOCH_BUCKET
from stagemesh.shared.errors import Rejected, Retryable
from stagemesh.shared.obs.log import Log

MAX_PENDING_MESSAGES = 4096
MAX_PENDING_BYTES = 8 << 20
CLOSE_TIMEOUT_S = 1.0
# a server that hangs is noticed after two pings; the default of 120 s would keep it "connected" for minutes
PING_INTERVAL_S = 5
# any number of rivals at one instance's epoch lose at most one race each a round
MAX_RACES = 64
_PERMISSIONS, _AUTHORIZATION = "permissions violation", "authorization violation"
_FOREIGN = (nats.errors.Error, OSError, RuntimeError)
"""A TimeoutError is an OSError; uvloop raises RuntimeError for a write to a connection that it has closed."""


@asynccontextmanager
async def open_nats_bus(
    url: str,
    *,
    name: str,
    connect_timeout_s: float,
    max_queued: int = MAX_QUEUED,
    watcher: Watcher | None = None,
    access: BusAccess = NOBODY,
    log: Log | None = None,
) -> AsyncIterator[NatsBus]:
    """A connected bus, closed at the end. `name` is what the server's monitoring shows.

    Raises Retryable if no server answers within `connect_timeout_s`, Rejected if it does not take the password.
    """
    bus = NatsBus(max_queued, watcher, access, log or Log(logging.getLogger(__name__)))
    await bus.connect(url, name, connect_timeout_s)
    try:
        yield bus
    finally:
        await bus.close()


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Of the loop: nats-py turns a plain stream into one of TLS, and at its end a protocol gives what TLS ignores."""
    return "returning true from eof_received()" not in record.getMessage()


class NatsBus:
    """Opened by `open_nats_bus`."""

    def __init__(self, max_queued: int, watcher: Watcher | None, access: BusAccess, log: Log) -> None:
        self._client = Client()
        self._access, self._log = access, log
        self._watcher = watcher
        self._outbox = Outbox(max_queued)
        self._bucket: KeyValue | None = None
        self._num_slow = self._num_refused = 0
        self._num_reconnects = 0
        self._last_error: Exception | None = None
        self._was_connected = False

    @property
    def client(self) -> Client:
        """For the micro protocol."""
        return self._client

    @property
    def stats(self) -> BusStats:
        return BusStats(
            connected=self._client.is_connected,
            num_queued=len(self._outbox),
            num_dropped=self._outbox.num_dropped,
            num_slow=self._num_slow,
            num_refused=self._num_refused,
            num_reconnects=self._num_reconnects,
        )

    async def connect(self, url: str, name: str, timeout_s: float) -> None:
        logging.getLogger("asyncio").addFilter(_is_worth_saying)  # which is there once, however often it is added
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.connect(
                    url,
                    name=name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    reconnect_time_wait=1,
                    max_reconnect_attempts=-1,
                    ping_interval=PING_INTERVAL_S,
                    **self._access.options(url),
                )
            self._was_connected = True
        except Rejected:
            await self._client.close()
            raise
        except _FOREIGN as error:
            await self._client.close()
            cause = self._last_error or error
            raise Retryable(f"no NATS server at {url} within {timeout_s} s: {cause!r}") from error

    async def next_epoch(self, instance: str) -> int:
        if not self._client.is_connected:  # nats-py would wait its whole timeout for an answer
            raise Retryable(f"no epoch for {instance}: the NATS server is away")
        try:
            bucket = await self._epochs()
            for _ in range(MAX_RACES):
                try:
                    return await _advance(bucket, instance)
                except nats.js.errors.KeyWrongLastSequenceError:
                    continue  # another process took this number
        except _FOREIGN as error:
            self._bucket = None  # a server that lost its store has no bucket any more
            raise Retryable(f"no epoch for {instance}: {error!r}") from error
        raise Retryable(f"no epoch for {instance}: lost {MAX_RACES} races for one")

    def publish(self, subject: str, payload: bytes) -> None:
        self._outbox.put(subject, payload)

    async def subscribe(self, pattern: str, handler: Handler) -> None:
        async def receive(message: Msg) -> None:
            try:
                handler(message.subject, message.data)
            except Exception as error:
                self._outbox.fail(error)

        try:
            await self._client.subscribe(
                pattern,
                cb=receive,
                pending_msgs_limit=MAX_PENDING_MESSAGES,
                pending_bytes_limit=MAX_PENDING_BYTES,
            )
            for _ in range(2):  # the server has it: what is published from now on arrives
                await self._client.flush()  # the first may be answered by what is left from connecting with a user
        except _FOREIGN as error:
            raise Retryable(f"cannot subscribe to {pattern}: {error!r}") from error

    async def run(self) -> None:
        await self._outbox.run(self._flush)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._flush()
                if self._client.is_connected:
                    await self._client.flush()
        except _FOREIGN as error:
            self._last_error = error
        self._outbox.drop_all()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()
        except _FOREIGN as error:
            self._last_error = error

    async def _flush(self) -> None:
        while self._client.is_connected and (message := self._outbox.take()) is not None:
            try:
                await self._client.publish(*message)
            except _FOREIGN as error:
                self._last_error = error
                self._outbox.num_dropped += 1

    async def _epochs(self) -> KeyValue:
        if self._bucket is None:
            stream = self._client.jetstream()
            try:
                self._bucket = await stream.key_value(EPOCH_BUCKET)
            except nats.js.errors.NotFoundError:
                self._bucket = await stream.create_key_value(bucket=EPOCH_BUCKET)
        return self._bucket

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if isinstance(error, nats.errors.SlowConsumerError):
            self._num_slow += 1
        if any(said in str(error).lower() for said in (_PERMISSIONS, _AUTHORIZATION)):
            self._num_refused += 1
            self._log.warning("the NATS server refuses this process", role=self._access.role, error=str(error))
        if not self._was_connected and _AUTHORIZATION in str(error).lower():  # or the library would try for ever
            raise Rejected(FIELD, f"the server does not take the user {self._access.role or '(none)'}")

    async def _on_disconnected(self) -> None:
        if "tls" in self._client.options:
            try:
                self._client.options["tls"] = self._access.context()
            except Rejected as error:
                self._log.warning("changed files are not taken: the last good ones stay", error=str(error))
        if self._watcher is not None:
            self._watcher(False)

    async def _on_reconnected(self) -> None:
        self._num_reconnects += 1
        self._outbox.work.set()
        if self._watcher is not None:
            self._watcher(True)


async def _advance(bucket: KeyValue, instance: str) -> int:
    """One compare-and-set. Raises KeyWrongLastSequenceError if another process was quicker."""
    try:
        entry = await bucket.get(instance)
    except nats.js.errors.KeyNotFoundError:
        await bucket.create(instance, b"1")
        return 1
    epoch = int(entry.value or b"0") + 1
    await bucket.update(instance, str(epoch).encode(), last=entry.revision)
    return epoch
