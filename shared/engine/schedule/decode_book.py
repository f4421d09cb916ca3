"""The sequences of a decode instance, by request, ticket and handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.microbatch import Microbatches
from stagemesh.shared.engine.pages import PageAllocator
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceState


class DecodeBook:
    """All sequences that are not forgotten, in order of arrival here: also those that are over but have something in
    flight."""

    def __init__(self) -> None:
        self._by_request: dict[RequestRef, DecodeSequence] = {}
        self._by_ticket: dict[str, DecodeSequence] = {}
        self._by_handle: dict[int, DecodeSequence] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(self._by_handle.values())

    def add(self, sequence: DecodeSequence) -> None:
        self._by_request[sequence.request] = self._by_ticket[sequence.ticket_id] = sequence
        self._by_handle[sequence.handle] = sequence

    def remove(self, sequence: DecodeSequence) -> None:
        del self._by_request[sequence.request], self._by_ticket[sequence.ticket_id], self._by_handle[sequence.handle]

    def of_request(self, request: RequestRef) -> DecodeSequence | None:
        return self._by_request.get(request)

    def of_ticket(self, ticket_id: str) -> DecodeSequence | None:
        return self._by_ticket.get(ticket_id)

    def of_handle(self, handle: int) -> DecodeSequence:
        """Raises Bug for a handle that nobody has."""
        sequence = self._by_handle.get(handle)
        if sequence is None:
            raise Bug(f"there is no sequence {handle}")
        return sequence

    def where(self, wanted: Callable[[DecodeSequence], bool]) -> list[DecodeSequence]:
        return [sequence for sequence in self._by_handle.values() if wanted(sequence)]

    @property
    def by_state(self) -> dict[str, int]:
        counts = Counter(sequence.state for sequence in self)
        return {state.value: counts[state] for state in SequenceState}

    @property
    def host_pages(self) -> int:
        """Pages of all copies in host memory."""
        return sum(sequence.host_pages for sequence in self)

    @property
    def any_suspended(self) -> bool:
        return any(sequence.suspended for sequence in self)

    @property
    def leaving_pages(self) -> int:
        """Pages that come back without anybody being asked: of sequences that are over, and of those whose KV is being
        copied to host memory."""
        return sum(len(s.pages) for s in self if s.pages and (s.over or s.suspended))

    def check_integrity(self, pages: PageAllocator, issuer: Issuer, microbatches: Microbatches) -> None:
        """Raises Bug if pages, steps, microbatches and sequences do not agree."""
        owned = sum(len(s.pages) for s in self) + issuer.num_freeing
        if owned != pages.num_used:
            raise Bug(f"{pages.num_used} pages are in use, but sequences own {owned}")
        in_flight = sum(len(step.rows) for step in issuer.outstanding.values())
        if in_flight != sum(s.in_flight for s in self):
            raise Bug(f"{in_flight} rows are out, sequences say otherwise")
        members = {handle for index in range(len(microbatches.sizes)) for handle in microbatches.members(index)}
        running = {s.handle for s in self if s.state is SequenceState.RUNNING}
        if members != running:
            raise Bug(f"sequences {sorted(members ^ running)} run and are in no microbatch, or the other way round")
        for sequence in self:
            _check_copy(sequence)
            if sequence.asked_back and sequence.state is not SequenceState.RESERVED:
                raise Bug(f"{sequence.request} is {sequence.state.value}, but its pages are being asked back")


def _check_copy(s: DecodeSequence) -> None:
    retracted = s.state is SequenceState.RETRACTED
    if (retracted and not s.host_pages) or (s.host_pages and not (retracted or s.over)):
        raise Bug(f"{s.request} is {s.state.value} with {s.host_pages} pages in host memory")
    if s.suspended and bool(s.pages) != bool(s.copying):
        raise Bug(f"{s.request} is retracted and has {len(s.pages)} pages, {len(s.copying)} stages copy them")
    if (s.restoring and not s.copying) or (s.copying and not s.host_pages):
        raise Bug(f"{s.request}: {len(s.copying)} stages copy its KV, restoring: {s.restoring}")
