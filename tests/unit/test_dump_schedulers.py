"""What sequences and tickets wait for, in words, all their way."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stagemesh.services.broker.describe import describe_ticket
from stagemesh.services.broker.ticket import Ticket, WriterOutcome
from stagemesh.services.broker.tickets import TicketBook
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.describe import describe_decode, describe_prefill
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.obs.entry import Entry
from tests.support.instances import DECODE, instance_of
from tests.support.ticket_lives import all_of, open_ticket

FAR_S = 1e12  # later than any clock of this machine
REQUEST, OTHER = RequestRef("r", 1), RequestRef("o", 1)
TARGETS = instance_of("decode-0", DECODE).stages


def waits(entries: Iterable[Entry], kind: str = "sequence") -> list[tuple[str, tuple[str, ...]]]:
    return [(entry.waits_for, entry.on) for entry in entries if entry.kind == kind]


class Prefill:
    """A prompt of 12 tokens in three chunks of which two can be out, and one other that may come before it."""

    def __init__(self) -> None:
        self.scheduler = PrefillScheduler(
            num_pages=8, page_size=4, pp_size=2, chunk_size=4, max_sequences=4, reserve_ahead=1, run_ahead=0
        )

    def submit(self, request: RequestRef, ticket_id: str) -> None:
        tokens = np.arange(12, dtype=np.int64)
        self.scheduler.submit(request, SamplingParams(max_tokens=5), tokens, ticket_id, "decode-0")

    def entries(self) -> list[Entry]:
        return list(describe_prefill(self.scheduler, "prefill-0", FAR_S))

    def wait(self) -> tuple[str, tuple[str, ...]]:
        (only,) = waits(self.entries())
        return only


def test_a_prompt_says_what_it_waits_for_all_its_way() -> None:
    prefill = Prefill()
    scheduler = prefill.scheduler
    prefill.submit(REQUEST, "t")
    assert prefill.wait() == ("its turn to ask for pages there", ("prefill-0",))
    assert scheduler.poll().reserve == ["t"]
    assert prefill.wait() == ("pages there", ("decode-0",))
    scheduler.reserved("t", (0, 1, 2), TARGETS)
    assert prefill.wait() == ("its turn to be announced to the broker", ("prefill-0",))
    assert scheduler.poll().fill == ["t"]
    assert prefill.wait() == ("its announcement to the broker", ("broker",))
    scheduler.filled("t")
    assert prefill.wait() == ("its turn, or pages here (8 free, 0 cached)", ("prefill-0",))
    assert len(scheduler.poll().commands) == 2
    assert prefill.wait() == ("its turn, or the chunks in flight", ("prefill-0",))
    assert [entry.name for entry in prefill.entries() if entry.kind == "step"] == ["1", "2"]
    scheduler.result(1, np.array([-1]))
    assert len(scheduler.poll().commands) == 1
    assert prefill.wait() == ("its first token", ("prefill-0",))
    scheduler.result(2, np.array([-1]))
    scheduler.result(3, np.array([7]))
    assert prefill.wait() == (
        "its KV to be sent and reported by ranks 0, 1",
        ("prefill-0/0", "prefill-0/1"),
    )
    scheduler.settled("t", 0)
    assert prefill.wait() == ("its KV to be sent and reported by ranks 1", ("prefill-0/1",))
    scheduler.settled("t", 1)
    (dropping,) = scheduler.poll().commands
    assert [(entry.kind, entry.name) for entry in prefill.entries()] == [("command", str(dropping.number))]
    scheduler.applied(dropping.number)
    assert prefill.entries() == []


def test_an_aborted_prompt_waits_for_its_chunks() -> None:
    prefill = Prefill()
    prefill.submit(REQUEST, "")
    prefill.scheduler.poll()
    prefill.scheduler.abort(REQUEST)
    assert prefill.wait() == ("its chunks in flight", ("prefill-0",))


class Decode:
    """Sequences of 4 prompt tokens, of which the pool holds one."""

    def __init__(self) -> None:
        self.scheduler = DecodeScheduler(num_pages=4, page_size=4, num_microbatches=1, max_running=4)

    def submit(self, request: RequestRef, ticket_id: str) -> None:
        self.scheduler.submit(request, SamplingParams(max_tokens=8), 4, ticket_id)

    def entries(self) -> list[Entry]:
        return list(describe_decode(self.scheduler, "decode-0", FAR_S))

    def waits(self) -> list[tuple[str, tuple[str, ...]]]:
        return waits(self.entries())


def test_a_sequence_says_what_it_waits_for_all_its_way() -> None:
    decode = Decode()
    scheduler = decode.scheduler
    scheduler.reserve("t", REQUEST)
    assert waits(decode.entries(), "reservation") == [("its router to announce it", ("router",))]
    scheduler.cancel_reserve("t")
    decode.submit(REQUEST, "t")
    assert decode.waits() == [("the prefill side to ask for pages", ("broker",))]
    scheduler.reserve("t", REQUEST)
    assert decode.waits() == [("3 pages here (4 free, 0 more expected of the 0 that have some)", ("decode-0",))]
    assert waits(decode.entries(), "reservation") == []
    assert scheduler.poll().admissions
    assert decode.waits() == [("its KV to be committed and its first token", ("broker",))]
    scheduler.commit("t")
    assert decode.waits() == [("its first token", ("router",))]
    scheduler.first_token(REQUEST, 5)
    assert decode.waits() == [("its turn", ("decode-0",))]
    scheduler.poll()
    assert decode.waits() == [("the results of its steps", ("decode-0",))]
    scheduler.abort(REQUEST)
    assert decode.waits() == [("the last results of its steps", ("decode-0",))]


def test_one_that_finds_no_pages_says_who_has_them() -> None:
    decode = Decode()
    for request, ticket_id in ((REQUEST, "t"), (OTHER, "u")):
        decode.submit(request, ticket_id)
        decode.scheduler.reserve(ticket_id, request)
    assert len(decode.scheduler.poll().admissions) == 1
    assert decode.waits()[1] == ("3 pages here (3 free, 2 more expected of the 1 that have some)", ("decode-0",))
    decode.scheduler.abort(REQUEST)
    (quarantine,) = [entry for entry in decode.entries() if entry.kind == "quarantine"]
    assert (quarantine.name, quarantine.waits_for) == ("t", "proof that nobody writes to its pages")


def test_one_that_is_retracted_says_where_its_kv_is() -> None:
    scheduler = DecodeScheduler(
        num_pages=8, page_size=4, num_microbatches=1, max_running=4, host_pages=9, schedule_conservativeness=0.0
    )
    for request, ticket_id in ((REQUEST, "t"), (OTHER, "u")):
        scheduler.submit(request, SamplingParams(max_tokens=28), 4, ticket_id)
        scheduler.reserve(ticket_id, request)
    scheduler.poll()
    for request, ticket_id in ((REQUEST, "t"), (OTHER, "u")):
        scheduler.commit(ticket_id)
        scheduler.first_token(request, 5)

    def go_on() -> None:
        commands = scheduler.poll().commands
        for step, issued in list(scheduler.issuer.outstanding.items()):
            scheduler.result(step, np.full(len(issued.rows), 7))
        if commands:
            scheduler.applied(commands[-1].number)

    for _ in range(20):
        go_on()
    (retracted,) = (s for s in scheduler.sequences if s.copying)

    def told() -> str:
        return waits(describe_decode(scheduler, "decode-0", FAR_S))[1][0]

    assert told() == "its KV to be copied to host memory by ranks 0"
    scheduler.copied(retracted.handle, 0, restored=False)
    room = "4 free, 2 more expected of the 1 that have some, 6 for the 1 retracted"
    assert told() == f"its turn to be resumed with 6 pages ({room})"
    scheduler.abort(REQUEST)
    go_on()
    go_on()
    (wait,) = waits(describe_decode(scheduler, "decode-0", FAR_S))
    assert wait == ("its KV to be copied back from host memory by ranks 0", ("decode-0/0",))


def test_a_ticket_says_what_it_waits_for_in_every_state() -> None:
    def told(ticket: Ticket, reserving: tuple[str, ...] = ()) -> tuple[str, str, tuple[str, ...]]:
        entry = describe_ticket(ticket, reserving, FAR_S)
        return entry.state, entry.waits_for, entry.on

    book = TicketBook("x")
    ticket = open_ticket(book)
    prefill, decode = ticket.prefill.name, ticket.decode.name
    assert told(ticket) == ("opened", "the prefill side to ask for pages", (prefill,))
    assert told(ticket, ("x-1",)) == ("opened", "pages there", (decode,))
    book.reserved(ticket)
    assert told(ticket) == ("reserved", "the announcement of the first write", (prefill,))
    book.fill(ticket)
    assert told(ticket) == ("filling", "the reports of writers 0, 1", (f"{prefill}/0", f"{prefill}/1"))
    book.report(ticket, 1, all_of(ticket, 1))
    assert told(ticket) == ("filling", "the reports of writers 0", (f"{prefill}/0",))
    book.report(ticket, 0, all_of(ticket, 0))
    assert told(ticket) == ("committed", "the decode side to take it over", (decode,))
    book.release(ticket)
    assert told(ticket) == ("closed", "", ())


def test_a_ticket_in_doubt_names_the_writer_and_the_reason() -> None:
    book = TicketBook("x")
    ticket = open_ticket(book)
    book.reserved(ticket)
    book.fill(ticket)
    book.report(ticket, 0, all_of(ticket, 0))
    book.report(ticket, 1, WriterOutcome((), "it broke", in_doubt=True))
    entry = describe_ticket(ticket, (), FAR_S)
    assert (entry.state, entry.on) == ("quiescing", (f"{ticket.prefill.name}/1",))
    assert entry.waits_for == "proof that writers 1 have nothing in flight"
    assert entry.details["reason"] == "prefill stage 1: it broke"
