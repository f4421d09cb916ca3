"""The Inspect service of a process: its invariants, its trace, its peers, what it waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from stagemesh.shared.errors import Bug, Rejected
from stagemesh.shared.obs.entry import Entry, encode_entries
from stagemesh.shared.obs.metrics import Sample
from stagemesh.shared.obs.reading import encode_readings
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.pb import inspect_pb2

INSPECT = inspect_pb2.DESCRIPTOR.services_by_name["Inspect"]


class Inspectable(Protocol):
    """What a process shows."""

    def check_integrity(self) -> None:
        """Raises Bug if an invariant does not hold."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """What is in flight; all zero when nothing is."""
        ...

    @property
    def gauges(self) -> Mapping[str, int]:
        """What else is worth a number."""
        ...

    def measure(self) -> Iterable[Sample]:
        """Its numbers as they are now."""
        ...

    def describe(self) -> Iterable[Entry]:
        """What is not over, and what each of it waits for."""
        ...


class InspectService:
    """Answers for one process."""

    def __init__(
        self,
        subject: Inspectable,
        tracer: Tracer,
        peers: Callable[[], Mapping[str, str]] | None = None,
        *,
        metrics_address: str = "",
        profile: Callable[[float], Awaitable[Path]] | None = None,
    ) -> None:
        """`profile` records so many seconds into a file; None where there is nothing to be seen."""
        self._subject, self._tracer, self._peers = subject, tracer, peers
        self._metrics_address, self._profile = metrics_address, profile

    async def Check(self, request: inspect_pb2.CheckRequest, context: Any) -> inspect_pb2.CheckReply:  # noqa: N802
        violation = ""
        try:
            self._subject.check_integrity()
        except Bug as error:
            violation = str(error)
        held, gauges = self._subject.held, self._subject.gauges
        return inspect_pb2.CheckReply(
            ok=not violation, violation=violation, held=held, gauges=gauges, metrics_address=self._metrics_address
        )

    async def Trace(self, request: inspect_pb2.TraceRequest, context: Any) -> inspect_pb2.TraceReply:  # noqa: N802
        return inspect_pb2.TraceReply(spans=self._tracer.dump())

    async def Measure(  # noqa: N802
        self, request: inspect_pb2.MeasureRequest, context: Any
    ) -> inspect_pb2.MeasureReply:
        return inspect_pb2.MeasureReply(samples=encode_readings(self._subject.measure()))

    async def Peers(self, request: inspect_pb2.PeersRequest, context: Any) -> inspect_pb2.PeersReply:  # noqa: N802
        known = self._peers() if self._peers else {}
        return inspect_pb2.PeersReply(peers=[inspect_pb2.Peer(name=n, address=a) for n, a in known.items()])

    async def Dump(self, request: inspect_pb2.DumpRequest, context: Any) -> inspect_pb2.DumpReply:  # noqa: N802
        return inspect_pb2.DumpReply(entries=encode_entries(list(self._subject.describe())))

    async def Profile(  # noqa: N802
        self, request: inspect_pb2.ProfileRequest, context: Any
    ) -> inspect_pb2.ProfileReply:
        if self._profile is None:
            raise Rejected("process", "only stages can be profiled")
        return inspect_pb2.ProfileReply(path=str(await self._profile(request.seconds)))
