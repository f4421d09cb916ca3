"""The prompts of a prefill instance, by request, ticket and handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.schedule.prefill_state import PrefillSequence
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceState


class PrefillBook:
    """All sequences that are not forgotten, in order of arrival here: also those that are over but have something in
    flight. A prompt whose KV goes nowhere has no ticket."""

    def __init__(self) -> None:
        self._by_request: dict[RequestRef, PrefillSequence] = {}
        self._by_ticket: dict[str, PrefillSequence] = {}
        self._by_handle: dict[int, PrefillSequence] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[PrefillSequence]:
        return iter(self._by_request.values())

    def add(self, sequence: PrefillSequence) -> None:
        self._by_request[sequence.request] = self._by_handle[sequence.handle] = sequence
        if sequence.ticket_id:
            self._by_ticket[sequence.ticket_id] = sequence

    def remove(self, sequence: PrefillSequence) -> None:
        del self._by_request[sequence.request], self._by_handle[sequence.handle]
        self._by_ticket.pop(sequence.ticket_id, None)

    def of_request(self, request: RequestRef) -> PrefillSequence | None:
        return self._by_request.get(request)

    def of_ticket(self, ticket_id: str) -> PrefillSequence | None:
        return self._by_ticket.get(ticket_id)

    def of_handle(self, handle: int) -> PrefillSequence:
        """Raises Bug for a handle that nobody has."""
        sequence = self._by_handle.get(handle)
        if sequence is None:
            raise Bug(f"there is no sequence {handle}")
        return sequence

    @property
    def by_state(self) -> dict[str, int]:
        counts = Counter(sequence.state for sequence in self)
        return {state.value: counts[state] for state in SequenceState}
