"""What a whole mesh waits for: the entries of its processes put together."""

from __future__ import annotations

from stagemesh.shared.obs.dump import ProcessDump, dump_json, dump_text, waiting_for
from stagemesh.shared.obs.entry import Entry, decode_entries, encode_entries

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
