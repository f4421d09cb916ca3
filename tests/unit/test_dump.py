"""What waits for what, in words: of schedulers, tickets and stages, and put together for a whole mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.services.broker.describe import describe_ticket
from stagemesh.services.broker.tickets import Ticket, TicketBook, WriterOutcome
from stagemesh.shared.core.commands import EMPTY, FROM_STEP, SAMPLE, Command, Ints, Join, RowLogprobs, SendPlan, Step
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.runner import StepOutput
from stagemesh.shared.engine.schedule.decode import DecodeScheduler
from stagemesh.shared.engine.schedule.describe import describe_decode, describe_prefill
from stagemesh.shared.engine.schedule.prefill import PrefillScheduler
from stagemesh.shared.obs.dump import ProcessDump, dump_json, dump_text, waiting_for
from stagemesh.shared.obs.entry import Entry, decode_entries, encode_entries
from stagemesh.shared.obs.trace import Tracer
from stagemesh.shared.stage.describe import StageNames, describe_executor, describe_outgoing
from stagemesh.shared.stage.executor import StageExecutor
from stagemesh.shared.stage.kv_sender import Outgoing, PieceSpan
from stagemesh.shared.stage.occupancy import Activity
from stagemesh.shared.transfer.base import TransferState
from stagemesh.shared.transfer.handle import Transfer
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
    assert prefill.wait() == ("its turn, or pages here (8 free)", ("prefill-0",))
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
        return list(describe_decode(self.scheduler, 4, "decode-0", FAR_S))

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
    assert decode.waits() == [("pages here (4 free, 0 promised to the 0 that have some)", ("decode-0",))]
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
    assert decode.waits()[1] == ("pages here (3 free, 2 promised to the 1 that have some)", ("decode-0",))
    decode.scheduler.abort(REQUEST)
    (quarantine,) = [entry for entry in decode.entries() if entry.kind == "quarantine"]
    assert (quarantine.name, quarantine.waits_for) == ("t", "proof that nobody writes to its pages")


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


# -- stages --


class Runner:
    """Has one sequence once it was told to, and samples the step's number."""

    def __init__(self) -> None:
        self.num_residents = 0

    def apply(self, command: Command) -> None:
        self.num_residents += len(command.joins) - len(command.drops)

    def run(self, step: Step, **_: object) -> StepOutput:
        return StepOutput(torch.full((len(step.rows),), step.number))


class Heard:
    """What the executor says, as events."""

    def __init__(self) -> None:
        self.applied_first, self.first_result = asyncio.Event(), asyncio.Event()

    def data_ready(self, step: int, num_tokens: int) -> None:
        raise AssertionError("a stage alone sends nothing on")

    def result(self, step: int, token_ids: Ints, logprobs: RowLogprobs) -> None:
        self.first_result.set()

    def applied(self, number: int) -> None:
        self.applied_first.set()


NAMES = StageNames("decode-0", 0, 2)


def spawn_nothing(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("nothing is to be spawned")


def told(executor: StageExecutor, names: StageNames = NAMES) -> tuple[str, str, tuple[str, ...]]:
    (entry,) = describe_executor(executor, names, residents=1, ring_queue=0, now_ns=int(FAR_S * 1e9))
    return entry.state, entry.waits_for, entry.on


def with_executor(follow: Callable[[StageExecutor, Heard], Coroutine[Any, Any, None]]) -> None:
    """Runs `follow` beside an executor that is its instance's only stage."""

    async def run() -> None:
        heard, runner = Heard(), Runner()
        executor = StageExecutor(
            runner,  # type: ignore[arg-type]
            heard,
            receiver=None,
            sender=None,
            kv=None,
            spawn=spawn_nothing,
            tracer=Tracer("decode-0/0"),
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(executor.run())
            await follow(executor, heard)
            running.cancel()

    asyncio.run(run())


def step_of(number: int, source_step: int) -> Step:
    return Step(number, 0, np.array([[1, 4, 1, source_step, 0, SAMPLE | FROM_STEP]]), EMPTY)


def test_a_stage_says_what_it_waits_for_and_counts_the_bubble() -> None:
    join = Join(1, REQUEST, SamplingParams(max_tokens=5))

    async def follow(executor: StageExecutor, heard: Heard) -> None:
        assert told(executor) == ("idle", "the next command", ())
        executor.submit(Command(1, joins=(join,)))
        assert executor.occupancy.activity is Activity.STARVED  # it has work from now on
        executor.submit(Command(2, step=step_of(8, source_step=7)))
        await heard.applied_first.wait()
        assert told(executor) == ("starved", "the ids of step 7, for step 8", ("decode-0/1",))
        executor.sampled(7, np.array([3]))
        await heard.first_result.wait()
        assert told(executor) == ("starved", "the next command", ())
        assert executor.steps_done == 1
        heard.applied_first.clear()
        executor.submit(Command(3, drops=(1,)))
        await heard.applied_first.wait()
        assert told(executor) == ("idle", "the next command", ())
        for activity in (Activity.STARVED, Activity.FORWARD):
            assert executor.occupancy.seconds(activity, executor.occupancy.since_ns) > 0

    with_executor(follow)


def test_a_later_stage_waits_for_the_one_before() -> None:
    async def follow(executor: StageExecutor, heard: Heard) -> None:
        later = StageNames("decode-0", 2, 3)
        assert told(executor, later) == ("idle", "the next command", ("decode-0/1",))
        executor.submit(Command(1))
        executor.submit(Command(2, step=step_of(8, source_step=7)))
        await heard.applied_first.wait()
        assert told(executor, later) == ("starved", "the activations of step 8", ("decode-0/1",))
        executor.hops[5] = 0
        hop = list(describe_executor(executor, later, residents=0, ring_queue=0, now_ns=2_000_000_000))[1]
        assert (hop.name, hop.age_s, hop.on) == ("of step 5", 2.0, ("decode-0/0",))

    with_executor(follow)


def transfer_of(num_batches: int) -> Transfer:
    return Transfer(num_pieces=2, num_bytes=8, num_batches=num_batches, on_settled=lambda _: None)


def test_an_outgoing_prompt_names_the_stages_that_it_still_writes_to() -> None:
    outgoing = Outgoing(SendPlan("t", 12, (0, 1, 2), TARGETS))
    done, open_write = transfer_of(0), transfer_of(1)
    outgoing.handles += [(PieceSpan(0, 0, 2), done), (PieceSpan(1, 0, 2), open_write)]
    outgoing.next_page = 2
    entry = describe_outgoing(outgoing, 4, FAR_S)
    assert (entry.waits_for, entry.on) == ("its writes to settle", (TARGETS[1].address,))
    assert entry.details == {"pages_written": "2/3", "writes_done": 1, "writes_queued": 1}
    open_write.batch_done(8)
    assert open_write.state is TransferState.DONE
    assert describe_outgoing(outgoing, 4, FAR_S).waits_for == "the next chunk"
    outgoing.reporting_s = FAR_S - 2
    entry = describe_outgoing(outgoing, 4, FAR_S)
    assert (entry.waits_for, entry.on, entry.details["reporting_s"]) == (
        "the broker to take its report",
        ("broker",),
        2,
    )


# -- put together --

YOUNG = Entry("request", "a/1", 1.0, "decode", "the next tokens", ("decode-0",), {"tokens": 3})
OLD = Entry("request", "b/1", 2.0, "prefill", "its first token", ("prefill-0",))


def test_entries_come_back_as_they_were_the_oldest_first() -> None:
    assert decode_entries(encode_entries([YOUNG, OLD])) == [OLD, YOUNG]


def test_an_entry_is_a_line() -> None:
    assert YOUNG.text() == "    1.000 s  request a/1, decode, waits for the next tokens [decode-0]  tokens=3"
    assert Entry("hop", "of step 5", 0.5).text() == "    0.500 s  hop of step 5"


DUMPS = [
    ProcessDump("decode-0/1", "unix:d1", error="Deadline Exceeded"),
    ProcessDump("decode-0/0", "unix:d0"),
    ProcessDump("prefill-0/0", "unix:p0", (Entry("outgoing", "t", 3.0, on=("unix:d1", "unix:d0")),)),
    ProcessDump("broker", "unix:b"),
    ProcessDump("router", "127.0.0.1:1", (YOUNG, OLD)),
]


def test_what_waits_for_a_process_is_found_by_its_name_its_instance_and_its_address() -> None:
    assert waiting_for(DUMPS[0], DUMPS) == {"request": 1, "outgoing": 1}
    assert waiting_for(ProcessDump("prefill-0/1", "unix:p1"), DUMPS) == {"request": 1}
    assert waiting_for(DUMPS[3], DUMPS) == {}


def test_those_that_do_not_answer_come_first_then_a_section_a_process() -> None:
    assert dump_text(DUMPS).splitlines() == [
        "decode-0/1  does not answer: Deadline Exceeded",
        "           what waits for it, or for its instance: 1 outgoing, 1 request",
        "router",
        OLD.text(),
        YOUNG.text(),
        "broker  nothing",
        "decode-0/0  nothing",
        "prefill-0/0",
        DUMPS[2].entries[0].text(),
    ]


def test_as_json_every_process_has_its_entries_or_its_error() -> None:
    document = dump_json(DUMPS)
    assert list(document) == ["router", "broker", "decode-0/0", "decode-0/1", "prefill-0/0"]
    assert document["decode-0/1"] == {
        "name": "decode-0/1",
        "address": "unix:d1",
        "entries": (),
        "error": "Deadline Exceeded",
    }
    assert document["router"]["entries"][0]["details"] == {"tokens": 3}


@pytest.mark.parametrize(("rank", "previous", "following"), [(0, "d/2", "d/1"), (2, "d/1", "d/0")])
def test_the_ring_has_no_end(rank: int, previous: str, following: str) -> None:
    names = StageNames("d", rank, 3)
    assert (names.previous, names.following) == (previous, following)
