"""What the parts of a decode scheduler share: its pages, its sequences, and a sequence's way through them."""

from __future__ import annotations

from stagemesh.shared.core.commands import Join, TokenLogprobs
from stagemesh.shared.core.tickets import LegState, TicketLeg
from stagemesh.shared.engine.issuer import Issuer
from stagemesh.shared.engine.microbatch import Microbatches
from stagemesh.shared.engine.pages import PageAllocator, pages_for
from stagemesh.shared.engine.schedule.admission import Growth
from stagemesh.shared.engine.schedule.decode_book import DecodeBook
from stagemesh.shared.engine.schedule.decode_state import DecodeActions, DecodeSequence
from stagemesh.shared.engine.schedule.legs import decode_leg
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput, end_after
from stagemesh.shared.engine.schedule.stats import DecodeStats
from stagemesh.shared.errors import Bug
from stagemesh.shared.fsm.sequence import SequenceEvent, SequenceState


class DecodeCore:
    """`actions` are what has been decided since the last poll."""

    def __init__(self, *, num_pages: int, page_size: int, num_microbatches: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.issuer = Issuer(self.pages)
        self.microbatches = Microbatches(num_microbatches)
        self.sequences = DecodeBook()
        self.growth = Growth(page_size)
        self.stats = DecodeStats()
        self.page_size = page_size
        self.actions = DecodeActions()
        self.quarantined: dict[str, TicketLeg] = {}

    def output(self, output: SequenceOutput) -> None:
        self.actions.outputs.append(output)

    def flush(self) -> None:
        """What is collected goes out, as a command without a step."""
        if (rest := self.issuer.flush()) is not None:
            self.actions.commands.append(rest)

    def take(self, sequence: DecodeSequence, num_tokens: int) -> None:
        """All pages for its first `num_tokens` tokens. Raises Bug if they are not there: whoever asks knows that."""
        pages = self.pages.allocate(pages_for(num_tokens, self.page_size))
        if pages is None:
            raise Bug(f"{sequence.request}: let in, but there are no pages for {num_tokens} tokens")
        sequence.pages = pages

    def give_back(self, sequence: DecodeSequence) -> None:
        """Its pages are free at once: no stage has heard of them, or every stage has forgotten them."""
        self.pages.release(sequence.pages)
        sequence.pages = []

    def prove_quiescent(self, ticket_id: str) -> None:
        """Nothing writes for the ticket any more."""
        self.pages.prove_quiescent(ticket_id)
        self.quarantined.pop(ticket_id, None)

    # -- a sequence's way --

    def start_if_ready(self, sequence: DecodeSequence) -> None:
        if not sequence.committed or sequence.first_token is None or sequence.over:
            return
        sequence.move(SequenceEvent.START)
        sequence.joined = True
        self.issuer.join(Join(sequence.handle, sequence.request, sequence.sampling, None, sequence.prompt_tokens))
        self.issuer.add_pages(sequence.handle, sequence.pages)
        self.enter(sequence)
        if end_after(sequence.sampling, sequence.first_token, 1) is not None:
            self.end(sequence, SequenceEvent.FINISH)

    def receive(self, sequence: DecodeSequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A new token, of one that runs or is retracted."""
        sequence.received += 1
        sequence.latest = token_id
        self.stats.decoded_tokens += 1
        if logprobs is not None and logprobs.failure:
            end: SequenceEnd | None = SequenceEnd.REJECTED
            self.output(SequenceOutput(sequence.request, end=end, error=logprobs.failure))
        else:
            end = end_after(sequence.sampling, token_id, sequence.received)
            told = () if logprobs is None else (logprobs,)
            self.output(SequenceOutput(sequence.request, (token_id,), end, logprobs=told))
        if end is not None:
            self.end(sequence, SequenceEvent.FINISH)

    def end(self, sequence: DecodeSequence, event: SequenceEvent) -> None:
        """Its pages follow once nothing of it is in flight and no stage copies its KV."""
        was = sequence.state
        sequence.move(event)
        sequence.asked_back = False
        if event is SequenceEvent.FINISH:
            self.growth.estimator.finished(sequence.sampling, sequence.received)
            self.stats.finished(sequence.predicted_tokens, sequence.received)
        if was is SequenceState.RUNNING:
            self.leave(sequence)
        elif was is SequenceState.RESERVED and sequence.committed:
            self.give_back(sequence)
        elif was is SequenceState.RESERVED:
            self.quarantined[sequence.ticket_id] = decode_leg(sequence, LegState.ENDING)
            self.pages.quarantine(sequence.ticket_id, sequence.pages)
            sequence.pages = []
        self.forget_if_done(sequence)

    def enter(self, sequence: DecodeSequence) -> None:
        """It runs from the next step on that is issued."""
        self.microbatches.join(sequence.handle, lambda handle: not self.sequences.of_handle(handle).in_flight)

    def leave(self, sequence: DecodeSequence) -> None:
        """It runs no longer."""
        self.microbatches.leave(sequence.handle, lambda handle: self.sequences.of_handle(handle).in_flight)

    def forget_if_done(self, sequence: DecodeSequence) -> None:
        if not sequence.over or sequence.in_flight or sequence.copying:
            return
        self.sequences.remove(sequence)
        if sequence.joined:
            self.issuer.drop(sequence.handle, sequence.pages)
