"""What the router counts of its requests, and which are under way.

arrived --tokenized--> live --ticket, first token--> ended, with one outcome
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

from stagemesh.services.router.attempt import Phase
from stagemesh.services.router.request import LiveRequest
from stagemesh.services.router.trace import trace_request
from stagemesh.shared.engine.schedule.stats import waits
from stagemesh.shared.errors import Exhausted, Rejected
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Detail, Entry
from stagemesh.shared.obs.metrics import Sample, by_label
from stagemesh.shared.obs.otel import NO_SPANS, Spans
from stagemesh.shared.obs.tally import Tally
from stagemesh.shared.obs.trace_ids import TraceIds


class Outcome(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"
    CLIENT_GONE = "client_gone"
    EXHAUSTED = "exhausted"


class WaitsFor(Enum):
    """TURN: others are sent off first. RECOMPUTE: it has had tokens, and is to be run again from them."""

    TOKENS = "tokens"
    TURN = "turn"
    TICKET = "ticket"
    FIRST_TOKEN = "first_token"
    RECOMPUTE = "recompute"


_WAITS: Final = {
    (Phase.PLACING, False): WaitsFor.TICKET,
    (Phase.PREFILL, False): WaitsFor.FIRST_TOKEN,
    (Phase.PLACING, True): WaitsFor.RECOMPUTE,
    (Phase.PREFILL, True): WaitsFor.RECOMPUTE,
}
TOKEN_BOUNDS_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
ANSWERED = frozenset({Outcome.STOP, Outcome.LENGTH})


def outcome_of(live: LiveRequest | None, error: BaseException | None) -> Outcome:
    """How a request has ended: by what ended its answer, else by what its handler raised."""
    if live is not None and live.ending is not None:
        return Outcome.ABORT if live.ending.end is None else Outcome(live.ending.end.value)
    match error:
        case Rejected():
            return Outcome.REJECTED
        case Exhausted():
            return Outcome.EXHAUSTED
        case asyncio.CancelledError() | GeneratorExit():
            return Outcome.CLIENT_GONE
    return Outcome.ERROR


class RequestRecord:
    """One request's times, from its arrival on. `live` is set once it has been tokenized."""

    def __init__(self) -> None:
        self.arrived_s = time.monotonic()
        self.request_id = "(not admitted)"
        self.client = ""  # the name of its API key
        self.trace: TraceIds | None = None
        self.is_admitted = False
        self.live: LiveRequest | None = None
        self._waits_for_ticket = self._waits_for_token = True

    def admitted(self, request_id: str) -> None:
        """There is room for it."""
        self.request_id, self.is_admitted = request_id, True

    @property
    def waits_for(self) -> WaitsFor | None:
        """Why it has no token yet, or no further one; None for those that run."""
        if self.live is not None and self.live.ending is not None:
            return None
        if self.live is not None and self.live.attempt is None:
            return WaitsFor.TURN
        return WaitsFor.TOKENS if self.live is None else _WAITS.get((self.live.phase, not self.has_no_token))

    @property
    def has_no_token(self) -> bool:
        return self.live is None or self.live.first_token_s is None

    def note(self, ticket: Tally, first_token: Tally) -> None:
        """Records what has come since the last call."""
        live = self.live
        if live is None:
            return
        if self._waits_for_ticket and live.ticket_s is not None:
            self._waits_for_ticket = False
            ticket.record(live.ticket_s)
        if self._waits_for_token and live.first_token_s is not None:
            self._waits_for_token = False
            first_token.record(live.started_s - self.arrived_s + live.first_token_s)

    def describe(self, now_s: float) -> Entry:
        if self.live is None:
            return Entry("request", self.request_id, now_s - self.arrived_s, "tokenizing", "a thread")
        phase, waits_for, on = self.live.waits
        details: dict[str, Detail] = {
            "prompt_tokens": len(self.live.token_ids),
            "tokens": f"{self.live.completion_tokens}/{self.live.sampling.max_tokens}",
            "instances": ",".join(self.live.instances),
            "attempts": self.live.num_attempts,
        }
        return Entry("request", self.live.name, now_s - self.arrived_s, phase, waits_for, on, details)


class RouterRecords:
    """Only the loop's thread touches it."""

    def __init__(self, spans: Spans = NO_SPANS) -> None:
        self._spans = spans
        self._open: set[RequestRecord] = set()
        self._ended = dict.fromkeys(Outcome, 0)
        self._prompt_tokens = self._ended_tokens = 0
        self._tokenize, self._ticket, self._first_token, self._total = waits(), waits(), waits(), waits()
        self._per_token = Tally(TOKEN_BOUNDS_S)
        self._refusal = waits()
        self._clients: Counter[tuple[str, str]] = Counter()  # by outcome; names come from the keys file: they are few
        self._client_tokens: Counter[tuple[str, str]] = Counter()  # by kind
        self._more_attempts = self._recomputed_tokens = 0  # of those that have ended

    @contextmanager
    def request(self) -> Iterator[RequestRecord]:
        """The life of a request's handler."""
        record, error = RequestRecord(), None
        self._open.add(record)
        try:
            yield record
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._open.discard(record)
            self._close(record, error)

    def tokenized(self, record: RequestRecord) -> None:
        """Its prompt was text, and is token ids now."""
        self._tokenize.record(time.monotonic() - record.arrived_s)

    def taken(self, record: RequestRecord, live: LiveRequest) -> None:
        """It is valid, and goes its way."""
        record.live = live
        self._prompt_tokens += len(live.token_ids)

    def _close(self, record: RequestRecord, error: BaseException | None) -> None:
        record.note(self._ticket, self._first_token)
        outcome, live = outcome_of(record.live, error), record.live
        if self._spans.enabled:
            trace_request(self._spans, record, outcome.value, error if outcome not in ANSWERED else None)
        self._ended[outcome] += 1
        if record.client:
            self._clients[record.client, outcome.value] += 1
        if outcome is Outcome.EXHAUSTED and not record.is_admitted:
            self._refusal.record(time.monotonic() - record.arrived_s)
        if live is None:
            return
        self._ended_tokens += live.delivered_tokens
        if record.client:
            self._client_tokens[record.client, "prompt"] += len(live.token_ids)
            self._client_tokens[record.client, "generated"] += live.delivered_tokens
        self._more_attempts += live.more_attempts
        self._recomputed_tokens += live.recomputed_tokens
        if outcome not in ANSWERED:
            return
        now_s = time.monotonic()
        self._total.record(now_s - record.arrived_s)
        if live.completion_tokens > 1 and live.first_token_s is not None:
            self._per_token.record((now_s - live.started_s - live.first_token_s) / (live.completion_tokens - 1))

    def measure(self) -> Iterator[Sample]:
        for record in self._open:
            record.note(self._ticket, self._first_token)
        lives = [record.live for record in self._open if record.live is not None]
        under_way = sum(live.delivered_tokens for live in lives)
        tokens = {"prompt": self._prompt_tokens, "generated": self._ended_tokens + under_way}
        yield from self._measure_waiting()
        yield Sample(metrics.MORE_ATTEMPTS, self._more_attempts + sum(live.more_attempts for live in lives))
        yield Sample(metrics.RECOMPUTED_TOKENS, self._recomputed_tokens + sum(live.recomputed_tokens for live in lives))
        yield from by_label(metrics.REQUESTS, {outcome.value: count for outcome, count in self._ended.items()})
        yield from by_label(metrics.TOKENS, tokens)
        yield from (Sample(metrics.CLIENT_REQUESTS, count, of) for of, count in self._clients.items())
        yield from (Sample(metrics.CLIENT_TOKENS, count, of) for of, count in self._client_tokens.items())
        yield Sample(metrics.LIVE_REQUESTS, len(self._open))
        yield Sample(metrics.TIME_TO_FIRST_TOKEN, self._first_token.snapshot())
        yield Sample(metrics.TIME_PER_OUTPUT_TOKEN, self._per_token.snapshot())
        yield Sample(metrics.REQUEST_SECONDS, self._total.snapshot())
        yield Sample(metrics.TOKENIZE_SECONDS, self._tokenize.snapshot())
        yield Sample(metrics.TICKET_SECONDS, self._ticket.snapshot())

    def _measure_waiting(self) -> Iterator[Sample]:
        now_s, reasons = time.monotonic(), Counter(record.waits_for for record in self._open)
        yield from by_label(metrics.WAITING_REQUESTS, {reason.value: reasons[reason] for reason in WaitsFor})
        without = [record.arrived_s for record in self._open if record.has_no_token]
        yield Sample(metrics.OLDEST_WAITING, now_s - min(without, default=now_s))
        yield Sample(metrics.REFUSAL_SECONDS, self._refusal.snapshot())

    def describe(self, now_s: float) -> Iterator[Entry]:
        """Every request that is not over. `now_s` is CLOCK_MONOTONIC."""
        return (record.describe(now_s) for record in self._open)
