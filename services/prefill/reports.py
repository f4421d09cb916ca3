"""What the stages of a prefill instance have reported of tickets, and to which start of the broker.

reported --broker started anew--> told again     forgotten with the prompt, once every stage has reported
`--in doubt: remembered for as long as this instance lives: no later word of its own is a proof
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stagemesh.shared.pb import broker_pb2

NONE: Final = frozenset[int]()


class Reports:
    """By ticket and rank."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, dict[int, broker_pb2.WriterReport]] = {}
        self._heard_by: dict[tuple[str, int], str] = {}
        self._doubtful: dict[str, set[int]] = {}

    def add(self, report: broker_pb2.WriterReport, heard_by: str) -> None:
        """`heard_by` is which start of the broker has taken note; empty if it has no such ticket."""
        self._by_ticket.setdefault(report.ticket_id, {})[report.pp_rank] = report
        self._heard_by[report.ticket_id, report.pp_rank] = heard_by
        if report.in_doubt:
            self._doubtful.setdefault(report.ticket_id, set()).add(report.pp_rank)

    def heard(self, report: broker_pb2.WriterReport, by: str) -> None:
        """It was told again, and this start of the broker has taken note."""
        if (report.ticket_id, report.pp_rank) in self._heard_by:
            self._heard_by[report.ticket_id, report.pp_rank] = by

    def unheard(self, broker: str) -> list[broker_pb2.WriterReport]:
        """Those that this start of the broker has not taken note of."""
        said = [report for reports in self._by_ticket.values() for report in reports.values()]
        return [r for r in said if self._heard_by[r.ticket_id, r.pp_rank] not in ("", broker)]

    def forget(self, broker: str, is_over: Callable[[str], bool]) -> None:
        """Drops the reports of tickets that are over and that this start of the broker has heard; doubts stay. A later
        one may have answered a stage before the head has heard of it: it is to be told the others' reports."""
        for ticket_id, reports in list(self._by_ticket.items()):
            heard_by = {self._heard_by[ticket_id, rank] for rank in reports}
            if heard_by <= {"", broker} and is_over(ticket_id):
                for rank in self._by_ticket.pop(ticket_id):
                    del self._heard_by[ticket_id, rank]

    def doubtful(self, ticket_id: str) -> bool:
        """A stage has ended without proof that no byte of the ticket arrives any more."""
        return ticket_id in self._doubtful

    def all_doubtful(self) -> dict[str, frozenset[int]]:
        """The ranks in doubt, by ticket."""
        return {ticket_id: frozenset(ranks) for ticket_id, ranks in self._doubtful.items()}
