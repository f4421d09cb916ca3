"""The way from a prompt's last chunk to its first decode step, read from spans."""

from __future__ import annotations

from typing import Any

from tests.support.handover import Handover, Span, cycles_ms, handovers

LAST, HEAD = "prefill-0/1", "decode-0/0"


def span(name: str, process: str, start_ms: int, end_ms: int | None = None, **attributes: Any) -> Span:
    end_ms = start_ms if end_ms is None else end_ms
    return {"name": name, "process": process, "start_ns": start_ms * 10**6, "end_ns": end_ms * 10**6, **attributes}


def way(ticket: str, at: int) -> list[Span]:
    """Its last chunk ends at `at`."""
    return [
        span("forward", "prefill-0/0", at - 8, at - 4, step=at),
        span("forward", LAST, at - 4, at, step=at),
        span("kv_write", "prefill-0/0", at - 4, at - 1, ticket=ticket),
        span("kv_write", LAST, at, at + 2, ticket=ticket),
        span("report", "broker", at, ticket=ticket, pp_rank=0),
        span("report", "broker", at + 3, ticket=ticket, pp_rank=1),
        span("committed", HEAD, at + 4, ticket=ticket),
        span("first_token", HEAD, at + 6, request=f"r-{ticket}"),
        span("issue", HEAD, at + 7, step=at + 1, microbatch=0, rows=1),
        span("first_step", HEAD, at + 7, step=at + 1, ticket=ticket, request=f"r-{ticket}"),
        span("forward", HEAD, at + 11, at + 13, step=at + 1, microbatch=0),
        span("forward", "decode-0/1", at + 13, at + 15, step=at + 1, microbatch=0),
    ]


def test_each_part_of_the_way_is_that_tickets_own() -> None:
    spans = way("a", 100) + way("b", 105)
    first, second = handovers(reversed(spans), LAST, HEAD)
    assert {first.chunk_ns, second.chunk_ns} == {100 * 10**6, 105 * 10**6}
    assert first.wait_ms == second.wait_ms == 11.0
    assert first.parts_ms == second.parts_ms
    assert first.parts_ms == {
        "KV written": 2.0,
        "reported": 1.0,
        "committed": 1.0,
        "first token later": 2.0,
        "issued": 1.0,
        "begun": 4.0,
    }


def test_a_first_token_that_is_there_before_the_kv_costs_nothing() -> None:
    way = Handover(*(at * 10**6 for at in (0, 1, 2, 5, 3, 6, 9)))
    assert way.parts_ms["first token later"] == 0
    assert sum(way.parts_ms.values()) == way.wait_ms == 9


def test_a_way_that_is_not_all_there_is_left_out() -> None:
    whole = way("a", 100)
    for missing in ("report", "committed", "first_token", "kv_write"):
        assert not handovers([s for s in whole if s["name"] != missing], LAST, HEAD)


def test_a_cycle_is_from_step_to_step_of_one_microbatch() -> None:
    steps = [span("forward", HEAD, 3 * at, step=at, microbatch=at % 2) for at in range(5)]
    assert cycles_ms(steps, HEAD) == [6.0, 6.0, 6.0]
