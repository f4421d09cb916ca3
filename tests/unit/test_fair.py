"""Clients share the turns, whatever each of them asks for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.services.router.departures import MOST_NEW_TOKENS, Departures
from stagemesh.services.router.fair import FairLine, over_their_share

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MOST_COST = 50.0


def fill(line: FairLine, client: str, count: int, *, cost: float = 1.0, weight: float = 1.0, tag: str = "") -> None:
    for index in range(count):
        line.add(f"{client}{tag}{index}", client, weight=weight, order=float(index), cost=cost)


def taken(line: FairLine, count: int) -> list[str]:
    return [request for request in (line.take() for _ in range(count)) if request is not None]


def test_a_flood_of_one_client_costs_another_one_turn() -> None:
    line = FairLine()
    fill(line, "flood", 1000)
    taken(line, 100)
    fill(line, "one", 3)
    assert sorted(request[:3] for request in taken(line, 6)) == ["flo"] * 3 + ["one"] * 3
    assert len(line) == 1000 - 100 - 3


def test_within_a_client_the_lowest_order_goes_first_and_ties_by_arrival() -> None:
    line = FairLine()
    for name, order in (("late", 5.0), ("urgent", -90.0), ("first", 1.0), ("second", 1.0)):
        line.add(name, "a", weight=1.0, order=order, cost=1.0)
    assert line.last_of("a") == "late"
    assert taken(line, 9) == ["urgent", "first", "second", "late"]
    assert line.last_of("a") is None


def test_costly_requests_get_fewer_turns_and_weight_more() -> None:
    line = FairLine()
    fill(line, "long", 100, cost=30.0)
    fill(line, "short", 100, cost=10.0)
    fill(line, "heavy", 100, cost=10.0, weight=2.0)
    counts = Counter(request.rstrip("0123456789") for request in taken(line, 100))
    assert counts["short"] == pytest.approx(3 * counts["long"], abs=2)
    assert counts["heavy"] == pytest.approx(2 * counts["short"], abs=2)


def test_nobody_saves_turns_up_by_staying_away_nor_by_coming_back() -> None:
    line = FairLine()
    fill(line, "busy", 100)
    fill(line, "away", 1)
    taken(line, 50)
    fill(line, "away", 40, tag="later")
    counts = Counter(request.rstrip("0123456789") for request in taken(line, 20))
    assert counts["busy"] == pytest.approx(10, abs=1)
    # one request at a time, a new one as soon as the last has gone: no more than its share either
    line = FairLine()
    fill(line, "busy", 100, cost=2.0)
    got = Counter[str]()
    for index in range(60):
        if not any(f"hops{at}" in line for at in range(index)):
            line.add(f"hops{index}", "hops", weight=1.0, order=0.0, cost=2.0)
        (request,) = taken(line, 1)
        got[request.rstrip("0123456789")] += 1
    assert got["hops"] == pytest.approx(got["busy"], abs=1)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.floats(1.0, MOST_COST), st.integers(-3, 3)),
        st.tuples(st.just("take"), st.just(""), st.just(0.0), st.just(0)),
        st.tuples(st.just("drop"), st.sampled_from("abc"), st.just(0.0), st.just(0)),
    ),
    max_size=120,
)


@given(moves)
def test_whatever_comes_the_line_is_as_good_as_a_list_and_work_is_conserved(
    steps: list[tuple[str, str, float, int]],
) -> None:
    line, waiting, number = FairLine(), dict[str, tuple[str, int, int]](), 0
    for kind, client, cost, order in steps:
        if kind == "add":
            number += 1
            line.add(f"r{number}", client, weight=WEIGHTS[client], order=float(order), cost=cost)
            waiting[f"r{number}"] = (client, order, number)
        elif kind == "take":
            request = line.take()
            assert (request is None) == (not waiting)
            if request is not None:
                own, *place = waiting.pop(request)
                assert all(place < rest for who, *rest in waiting.values() if who == own)
        elif (last := line.last_of(client)) is not None:
            line.discard(last)
            line.discard(last)
            del waiting[last]
        assert len(line) == len(waiting)
        assert all(request in line for request in waiting)
        line.check_integrity()


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(1.0, MOST_COST), min_size=40, max_size=60), min_size=2),
    st.integers(0, 30),
    st.integers(1, 30),
)
def test_two_clients_that_both_wait_get_the_same_for_their_weight_but_for_a_turn(
    costs: dict[str, list[float]], skip: int, count: int
) -> None:
    line, cost_of = FairLine(), dict[str, float]()
    for client, each in costs.items():
        for index, cost in enumerate(each):
            cost_of[f"{client}{index}"] = cost
            line.add(f"{client}{index}", client, weight=WEIGHTS[client], order=float(index), cost=cost)
    taken(line, min(skip, 9))  # the rule holds over any stretch, not from the start alone
    got = dict.fromkeys(costs, 0.0)
    for request in taken(line, count):
        if any(line.last_of(client) is None for client in costs):
            return
        got[request[0]] += cost_of[request] / WEIGHTS[request[0]]
    most = {client: MOST_COST / WEIGHTS[client] for client in costs}
    for one in costs:
        for other in costs:
            assert got[one] - got[other] <= most[one] + most[other] + 1e-6


def test_who_has_most_of_the_places_for_its_weight_makes_room_first() -> None:
    waiting = {"a": 10, "b": 12, "c": 3}
    assert list(over_their_share(waiting, {"b": 2.0, "c": 1.0}, "new")) == ["a", "b", "c"]
    assert list(over_their_share(waiting, {}, "b")) == []
    assert list(over_their_share(waiting, {}, "a")) == ["b"]
    assert list(over_their_share({"a": 1}, {}, "b")) == []


def test_as_many_are_sent_off_as_there_is_room_for_and_each_that_is_done_makes_room() -> None:
    begun, room = list[str](), 2
    departures = Departures(lambda: room)

    def wait(name: str, client: str) -> None:
        departures.wait(
            name,
            client,
            lambda: begun.append(name),
            weight=1.0,
            order=0.0,
            prompt_tokens=4,
            max_tokens=MOST_NEW_TOKENS * 9,
        )

    for index in range(6):
        wait(f"a{index}", "a")
    wait("b0", "b")
    assert begun == ["a0", "a1"]
    departures.done("a0")
    departures.done("a0")
    assert begun == ["a0", "a1", "b0"]
    departures.done("a2")  # its client has gone before its turn
    room = 3
    departures.done("nobody")
    assert begun[3:] == ["a3"]
    assert departures.crowded_out({"a": 4}, {}, "b") == ["a5"]
    assert departures.crowded_out({"a": 4}, {}, "b", 2) == ["a5", "a4"]
    assert departures.crowded_out({"a": 4}, {}, "b", 3) is None  # b would have more than a then
    assert departures.crowded_out({"a": 4, "b": 3}, {}, "c", 2) == ["a5", "a4"]
    assert departures.crowded_out({"a": 4}, {}, "b", 3, free=1) is None
    assert departures.crowded_out({"a": 4}, {"a": 2.0}, "b", 2, free=1) is None
    assert departures.crowded_out({"a": 4}, {}, "b", 2, free=2) == []
    assert departures.crowded_out({"b": 4}, {}, "a") is None  # all of b's are under way
    departures.check_integrity()
