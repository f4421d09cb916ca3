"""What stages have reported is told to every start of the broker that may not have heard it."""

from __future__ import annotations

from stagemesh.services.prefill.reports import Reports
from stagemesh.shared.pb import broker_pb2


def report(rank: int, *, in_doubt: bool = False) -> broker_pb2.WriterReport:
    return broker_pb2.WriterReport(ticket_id="t", pp_rank=rank, in_doubt=in_doubt, error="late" if in_doubt else "")


def test_what_one_broker_has_heard_the_next_is_told() -> None:
    reports = Reports()
    reports.add(report(0), "one")
    assert reports.unheard("one") == []
    assert reports.unheard("two") == [report(0)]
    reports.heard(report(0), "two")
    assert reports.unheard("two") == []


def test_a_report_is_kept_while_another_stage_was_heard_by_a_later_broker() -> None:
    """The head may hear from its stages before it hears that it has joined anew."""
    reports = Reports()
    reports.add(report(0), "one")
    reports.add(report(1), "two")
    reports.forget("one", lambda _: True)
    assert reports.unheard("two") == [report(0)]
    reports.heard(report(0), "two")
    reports.forget("two", lambda _: True)
    assert reports.unheard("three") == []


def test_a_report_that_was_refused_is_told_to_nobody() -> None:
    reports = Reports()
    reports.add(report(0), "")
    assert reports.unheard("two") == []


def test_reports_go_with_their_ticket_but_doubts_stay() -> None:
    reports = Reports()
    reports.add(report(0), "one")
    reports.add(report(1, in_doubt=True), "one")
    reports.forget("one", lambda _: False)
    assert len(reports.unheard("two")) == 2
    reports.forget("one", lambda _: True)
    assert reports.unheard("two") == []
    assert (reports.doubtful("t"), reports.all_doubtful()) == (True, {"t": frozenset({1})})
