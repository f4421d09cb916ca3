"""The picture of what a mesh did."""

from __future__ import annotations

from stagemesh.shared.obs.timeline import Span, picture

MS = 1_000_000


def span(process: str, name: str, start_ms: int, end_ms: int, **attributes: int) -> Span:
    return {"process": process, "name": name, "start_ns": start_ms * MS, "end_ns": end_ms * MS, **attributes}


def test_a_prefill_chunk_of_a_single_token_is_no_decode_step() -> None:
    spans = [
        span("prefill-0/0", "forward", 0, 9, microbatch=0, tokens=1, rows=1),
        span("prefill-0/0", "kv_write", 10, 19),
        span("prefill-0/1", "forward", 10, 19, microbatch=0, tokens=1, rows=1),
        span("prefill-1/0", "forward", 20, 29, microbatch=3, tokens=256, rows=2),  # nothing to write yet
        span("decode-0/0", "forward", 40, 59, microbatch=1, tokens=1, rows=1),
        span("decode-0/0", "forward", 150, 159, microbatch=1, tokens=1, rows=1),
    ]
    assert picture(spans, columns=10, window_ns=100 * MS) == [
        "    decode-0/0 |    11    |",
        "   prefill-0/0 |#~        |",
        "   prefill-0/1 | #        |",
        "   prefill-1/0 |  #       |",
    ]


def test_what_an_instance_wrote_before_its_role_was_switched_says_nothing_of_now() -> None:
    spans = [
        span("decode-1/0", "kv_write", 0, 5),
        span("decode-1/0", "forward", 100, 199, microbatch=0, tokens=1, rows=1),
    ]
    assert picture(spans, columns=4, window_ns=100 * MS) == ["    decode-1/0 |0000|"]
