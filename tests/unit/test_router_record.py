"""How the router counts requests: one outcome each, every token, and their times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from stagemesh.services.router.record import Outcome, RouterRecords
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput
from stagemesh.shared.errors import Exhausted, Rejected, Retryable
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.metrics import Metric
from stagemesh.shared.obs.tally import Distribution
from tests.support.live_requests import begun

REF = RequestRef("r", 1)
TOKEN = SequenceOutput(REF, (5,))


class Clients:
    """Requests as the router's handler takes them through a record."""

    def __init__(self) -> None:
        self.records = RouterRecords()

    def end(
        self, error: BaseException | None = None, outputs: Iterable[SequenceOutput] = (), *, aborted: bool = False
    ) -> None:
        """One that was tokenized and had `outputs`, all of them passed on."""
        with self.records.request() as record:
            self.records.tokenized(record)
            record.admitted("r")
            live, attempts = begun([1, 2, 3])
            self.records.taken(record, live)
            for output in outputs:
                attempts.last.on_output(output)
            if aborted:
                live.abort()
            if outputs:
                asyncio.run(live.next())
            if error is not None:
                raise error

    def values(self, metric: Metric) -> dict[tuple[str, ...], object]:
        return {sample.labels: sample.value for sample in self.records.measure() if sample.metric is metric}

    def count(self, metric: Metric) -> int:
        """Values in a histogram."""
        (seen,) = self.values(metric).values()
        assert isinstance(seen, Distribution)
        return seen.count

    @property
    def outcomes(self) -> dict[str, object]:
        return {label: value for (label,), value in self.values(metrics.REQUESTS).items() if value}


@pytest.mark.parametrize("end", [SequenceEnd.STOP, SequenceEnd.LENGTH])
def test_a_request_that_ends_well_counts_its_tokens_and_times(end: SequenceEnd) -> None:
    clients = Clients()
    clients.end(outputs=[TOKEN, TOKEN, SequenceOutput(REF, (6,), end)])
    assert clients.outcomes == {end.value: 1}
    assert clients.values(metrics.TOKENS) == {("prompt",): 3, ("generated",): 3}
    for metric in (metrics.TIME_TO_FIRST_TOKEN, metrics.TIME_PER_OUTPUT_TOKEN, metrics.REQUEST_SECONDS):
        assert clients.count(metric) == 1, metric.name


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Rejected("max_tokens", "too many"), Outcome.REJECTED),
        (Exhausted("full"), Outcome.EXHAUSTED),
        (Retryable("it is lost"), Outcome.ERROR),
        (RuntimeError("a bug"), Outcome.ERROR),
        (asyncio.CancelledError(), Outcome.CLIENT_GONE),
        (GeneratorExit(), Outcome.CLIENT_GONE),
    ],
)
def test_one_that_ends_otherwise_counts_by_what_its_handler_raised(error: BaseException, outcome: Outcome) -> None:
    clients = Clients()
    with pytest.raises(type(error)):
        clients.end(error, [TOKEN])
    assert clients.outcomes == {outcome.value: 1}
    assert clients.values(metrics.TOKENS) == {("prompt",): 3, ("generated",): 1}
    assert clients.count(metrics.REQUEST_SECONDS) == 0


def test_what_ended_the_answer_counts_even_if_the_client_goes_away_then() -> None:
    clients = Clients()
    with pytest.raises(GeneratorExit):
        clients.end(GeneratorExit(), [SequenceOutput(REF, (5,), SequenceEnd.STOP)])
    clients.end(outputs=[TOKEN], aborted=True)
    assert clients.outcomes == {"stop": 1, "abort": 1}


def test_one_under_way_counts_what_it_has_passed_on() -> None:
    clients = Clients()
    with clients.records.request() as record:
        assert clients.values(metrics.LIVE_REQUESTS) == {(): 1}
        live, attempts = begun([1, 2])
        clients.records.taken(record, live)
        attempts.say(5)
        assert clients.values(metrics.TOKENS) == {("prompt",): 2, ("generated",): 0}
        asyncio.run(live.next())
        assert clients.values(metrics.TOKENS) == {("prompt",): 2, ("generated",): 1}
        assert clients.count(metrics.TIME_TO_FIRST_TOKEN) == 1
    assert clients.values(metrics.LIVE_REQUESTS) == {(): 0}
