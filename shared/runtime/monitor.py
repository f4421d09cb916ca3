"""What a process tells of itself while it runs: its numbers once a second, for Prometheus.

The loop measures, and only the loop; the thread that serves HTTP sees what was published last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Final, Protocol

from stagemesh.shared.config import MetricsSection
from stagemesh.shared.errors import Bug
from stagemesh.shared.obs.exposition import Exposition, serve_metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.obs.metrics import (
    CERTIFICATE_EXPIRY,
    INTEGRITY_VIOLATION,
    LOOP_LAG,
    LOOP_LAG_MAX,
    SAMPLED,
    Identity,
    Sample,
)
from stagemesh.shared.runtime.loop import LagSampler
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.security.material import Material

INTERVAL_S: Final = 1.0
IDLE_CHECK_S: Final = 5.0
BUSY_CHECK_S: Final = 30.0
"""A check walks every page, which takes milliseconds of the loop: with work under way that is worth it now and then."""
CHECK_SHARE: Final = 1e-3
"""Of the loop's time, for checks, at most: a pool of 50,000 pages with as many in the prefix tree takes 20 ms."""
MOST_PAUSE_S: Final = 300.0
"""Between checks, however long they take."""


class Measured(Protocol):
    """What a process shows of itself."""

    def check_integrity(self) -> None:
        """Raises Bug if an invariant does not hold."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """What is in flight; all zero when nothing is."""
        ...

    def measure(self) -> Iterable[Sample]:
        """Its numbers as they are now."""
        ...


class Monitor:
    """`start` serves, `run` samples; both do nothing if metrics are switched off. `certificates` by which side of the
    process they are for."""

    def __init__(
        self,
        section: MetricsSection,
        identity: Identity,
        subject: Measured,
        lag: LagSampler,
        certificates: Mapping[str, Material | None],
    ) -> None:
        self._section, self._subject, self._lag = section, subject, lag
        self._certificates = {side: material for side, material in certificates.items() if material is not None}
        self._exposition = Exposition(identity)
        self._violated = False
        self._checked_s = float("-inf")
        self._check_took_s = 0.0
        self.address = ""  # host:port; empty if they are not served

    def identify(self, identity: Identity) -> None:
        """Who the process is from now on."""
        self._exposition.identity = identity

    async def start(self, stack: AsyncExitStack, notifier: Notifier, log: Log) -> None:
        """Serves until `stack` is closed, and says where. Raises Rejected if the port is taken."""
        if not self._section.enabled:
            return
        registry = self._exposition.registry
        self.address = await serve_metrics(stack, registry, self._section.host, self._section.port)
        notifier.metrics(self.address)
        log.info("metrics are served", metrics_address=self.address)

    async def run(self) -> None:
        """A child of the service: runs until cancelled."""
        while self._section.enabled:
            self.sample(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    def sample(self, now_s: float) -> None:
        least_s = IDLE_CHECK_S if self._idle else BUSY_CHECK_S
        pause_s = min(max(least_s, self._check_took_s / CHECK_SHARE), MOST_PAUSE_S)
        if now_s - self._checked_s >= pause_s:
            self._checked_s = now_s
            self._check()
        self._exposition.publish([*self._own(), *self._subject.measure()])

    @property
    def _idle(self) -> bool:
        return not any(self._subject.held.values())

    def _check(self) -> None:
        start_s = time.thread_time()  # a process that is stopped meanwhile has not worked for it
        try:
            self._subject.check_integrity()
            self._violated = False
        except Bug:
            self._violated = True
        self._check_took_s = time.thread_time() - start_s

    def _own(self) -> Iterator[Sample]:
        yield Sample(SAMPLED, time.time())
        yield Sample(INTEGRITY_VIOLATION, float(self._violated))
        yield Sample(LOOP_LAG, self._lag.tally.snapshot())
        yield Sample(LOOP_LAG_MAX, self._lag.max_lag_s)
        for side, material in self._certificates.items():
            if (end_s := material.current().not_after_s) is not None:
                yield Sample(CERTIFICATE_EXPIRY, end_s, (side,))
