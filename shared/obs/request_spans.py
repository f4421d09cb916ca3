"""What a stage did for each request, as spans: a chunk of a prompt each, the decode steps of a sequence as one.

joins --> rows of steps: a prefill chunk each, or one more decode step --> drops: the span of all its decode steps
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from stagemesh.shared.core.commands import COUNT, HANDLE, START, Command, Step
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.obs.otel import NO_SPANS, Attributes, Spans


@dataclass(slots=True)
class _Decoding:
    """A sequence's decode steps on this stage so far."""

    request: RequestRef
    first_ns: int = 0
    last_ns: int = 0
    steps: int = 0
    busy_ns: int = 0


class RequestSpans:
    """Of one stage. Costs nothing where nobody wants spans."""

    def __init__(self, spans: Spans, role: str, process: str) -> None:
        self._spans, self._decodes, self._process = spans, role == "decode", process
        self._sequences: dict[int, _Decoding] = {}
        self._tickets: dict[str, RequestRef] = {}

    def applied(self, command: Command) -> None:
        """The stage has applied it: its drops first, then its joins."""
        if not self._spans.enabled:
            return
        for handle in command.drops:
            if (sequence := self._sequences.pop(handle, None)) is not None and sequence.steps:
                self._end(sequence)
        for join in command.joins:
            self._sequences[join.handle] = _Decoding(join.request)
            if join.send is not None:
                self._tickets[join.send.ticket_id] = join.request

    def ran(self, step: Step, start_ns: int) -> None:
        """The stage has run it, until now."""
        if not self._spans.enabled:
            return
        end_ns = time.monotonic_ns()
        for row in step.rows.tolist():
            sequence = self._sequences.get(row[HANDLE])
            if sequence is None:
                continue
            if self._decodes:
                sequence.first_ns, sequence.last_ns = sequence.first_ns or start_ns, end_ns
                sequence.steps, sequence.busy_ns = sequence.steps + 1, sequence.busy_ns + end_ns - start_ns
            else:
                self._span("prefill chunk", sequence.request, start_ns, end_ns, start=row[START], tokens=row[COUNT])

    def wrote(self, ticket_id: str, start_ns: int, end_ns: int, *, num_bytes: int, state: str) -> None:
        """KV of a ticket has travelled to a stage of the decode side."""
        if (request := self._tickets.get(ticket_id)) is not None:
            self._span("kv transfer", request, start_ns, end_ns, bytes=num_bytes, state=state, ticket=ticket_id)

    def reported(self, ticket_id: str) -> None:
        """Nothing of the ticket is to come any more."""
        self._tickets.pop(ticket_id, None)

    def _end(self, sequence: _Decoding) -> None:
        if self._decodes:
            busy_ms = sequence.busy_ns / 1e6
            first_ns, last_ns = sequence.first_ns, sequence.last_ns
            self._span("decode", sequence.request, first_ns, last_ns, steps=sequence.steps, busy_ms=busy_ms)

    def _span(
        self, name: str, request: RequestRef, start_ns: int, end_ns: int, **attributes: str | int | float
    ) -> None:
        told: Attributes = {"stagemesh.process": self._process, "stagemesh.attempt": request.attempt}
        own: Attributes = {f"stagemesh.{key}": value for key, value in attributes.items()}
        self._spans.span(name, request.request_id, start_ns, end_ns, {**told, **own})


NO_REQUEST_SPANS: Final = RequestSpans(NO_SPANS, "", "")
