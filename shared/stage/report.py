"""What a prefill stage says once nothing of a ticket is in flight: to the broker, then round the ring to the head.

The head says it again to a broker that has not heard it."""

from __future__ import annotations

from collections.abc import Callable

from stagemesh.shared.codec.mesh import ref_to_pb
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2, stage_pb2
from stagemesh.shared.rpc.broker import BrokerClient
from stagemesh.shared.runtime.backoff import retry
from stagemesh.shared.stage.kv_sender import Outcome

Settled = Callable[[stage_pb2.Settled], None]


class WriterReports:
    """A `Report`. While the broker is away the report is tried again: the head keeps the pages pinned meanwhile."""

    def __init__(
        self,
        broker: BrokerClient,
        ref: InstanceRef,
        pp_rank: int,
        settled: Callable[[stage_pb2.Settled], None],
        log: Log,
    ) -> None:
        self._broker, self._ref, self._pp_rank, self._settled = broker, ref, pp_rank, settled
        self._log = log

    async def __call__(self, outcome: Outcome) -> None:
        report = broker_pb2.WriterReport(
            ticket_id=outcome.ticket_id,
            instance=ref_to_pb(self._ref),
            pp_rank=self._pp_rank,
            pieces=[
                broker_pb2.PieceRange(
                    target_rank=span.target_rank, first_page=span.first, last_page=span.last, crcs=span.crcs
                )
                for span in outcome.spans
            ],
            kv_bytes=outcome.kv_bytes,
            error=outcome.error,
            in_doubt=outcome.in_doubt,
        )
        if outcome.error and outcome.error != "cancelled":
            self._log.warning(
                "KV was not sent", ticket_id=outcome.ticket_id, error=outcome.error, in_doubt=outcome.in_doubt
            )
        broker = ""
        try:
            broker = await retry(lambda: self._broker.report_writer(report))
        except StagemeshError as error:
            self._log.warning("a report was refused", ticket_id=outcome.ticket_id, error=str(error))
        self._settled(stage_pb2.Settled(report=report, broker=broker))
