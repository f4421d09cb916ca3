"""Who is let in and who must give way, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.admission import LOOK_PAST, LOOK_PAST_S, Growth, Room, to_admit, to_resume
from stagemesh.shared.engine.schedule.decode_book import DecodeBook
from stagemesh.shared.engine.schedule.decode_state import DecodeSequence
from stagemesh.shared.engine.schedule.pressure import Relief, growing, plan_relief
from stagemesh.shared.errors import Rejected
from stagemesh.shared.fsm.sequence import SequenceState

PAGE = 4


class Cast:
    """Sequences of an instance, made up."""

    def __init__(self) -> None:
        self.book, self.growth = DecodeBook(), Growth(PAGE, conservativeness=0.0)

    def add(
        self,
        state: SequenceState = SequenceState.WAITING,
        *,
        prompt: int = 4,
        made: int = 0,
        limit: int = 100,
        **more: Any,
    ) -> DecodeSequence:
        """Without `arrived_s` the later the younger."""
        number = len(self.book) + 1
        request, sampling = RequestRef(f"r{number}", 0), SamplingParams(max_tokens=limit)
        sequence = DecodeSequence(request, sampling, prompt, f"t{number}", number, state=state, **more)
        sequence.arrived_s = more.get("arrived_s", float(number))
        sequence.issued = sequence.received = made
        if state in (SequenceState.RUNNING, SequenceState.RESERVED):
            sequence.pages = list(range(-(-sequence.position // PAGE)))
        if state is SequenceState.RETRACTED:
            sequence.host_pages = -(-sequence.position // PAGE)
        self.book.add(sequence)
        return sequence

    def relief(self, available: int, run_on: int = 8) -> Relief:
        return plan_relief(self.book, growing(self.book), available, PAGE, run_on)


RUNNING, RESERVED, RETRACTED = SequenceState.RUNNING, SequenceState.RESERVED, SequenceState.RETRACTED


def test_nobody_gives_way_while_all_can_go_on() -> None:
    cast = Cast()
    for made in (1, 20, 40):
        cast.add(RUNNING, made=made)
    assert cast.relief(available=3) == Relief()


def test_reservations_that_nobody_fills_go_before_any_sequence_latest_first() -> None:
    cast = Cast()
    for made in (1, 20):
        cast.add(RUNNING, made=made)
    first, second = (cast.add(RESERVED, prompt=8) for _ in range(2))
    cast.add(RESERVED, committed=True)
    cast.add(RESERVED, kept=True)
    cast.add(RESERVED, asked_back=True)
    assert cast.relief(available=0) == Relief(cancel=[second, first])


def test_victims_are_those_with_the_fewest_tokens_then_the_longest_prompts() -> None:
    cast = Cast()
    cast.add(RUNNING, made=1)  # the oldest
    many = cast.add(RUNNING, made=30, prompt=40)
    few = cast.add(RUNNING, made=10)
    long = cast.add(RUNNING, made=10, prompt=8)
    assert cast.relief(available=0, run_on=4).victims == [long]
    assert cast.relief(available=0, run_on=12).victims == [long, few]
    assert cast.relief(available=0, run_on=60).victims == [long, few, many]


def test_the_oldest_is_never_a_victim_whatever_its_handle() -> None:
    cast = Cast()
    cast.add(RUNNING, made=50)
    oldest = cast.add(RUNNING, made=1, prompt=90, arrived_s=-5.0)
    relief = cast.relief(available=0, run_on=100)
    assert oldest not in relief.victims
    assert len(relief.victims) == 1


def test_one_that_is_about_to_end_or_comes_back_is_no_victim() -> None:
    cast = Cast()
    cast.add(RUNNING, made=9)
    cast.add(RUNNING, made=5, limit=5)  # its last step is out
    back = cast.add(RETRACTED, made=4)
    back.restoring, back.copying, back.pages = True, {0}, [7, 8]
    assert cast.relief(available=0, run_on=40).victims == []


def test_relief_makes_room_for_the_others_to_go_on_for_a_while() -> None:
    """One victim would do for now: two are taken, so that the next relief is some way off."""
    cast = Cast()
    for _ in range(6):
        cast.add(RUNNING, made=9, prompt=4)  # 3 pages each; each needs 2 more to go on for 8 tokens
    assert len(cast.relief(available=5, run_on=4).victims) == 1
    assert len(cast.relief(available=5).victims) == 2


def candidates_of(cast: Cast, *prompts: int) -> list[DecodeSequence]:
    return [cast.add(prompt=prompt) for prompt in prompts]


def admit(cast: Cast, candidates: list[DecodeSequence], budget: int, now_s: float = 0.0) -> list[DecodeSequence]:
    room = Room(whole=1000, budget=budget, free=budget, slots=100)
    return to_admit([c for c in candidates if not c.pages], cast.book, cast.growth, room, now_s)


def test_one_that_does_not_fit_is_passed_by_a_few_only() -> None:
    cast = Cast()
    large, *small = candidates_of(cast, 400, *[4] * (2 * LOOK_PAST))
    assert admit(cast, [large, *small], budget=90) == small[:LOOK_PAST]
    assert large.passed == LOOK_PAST
    assert admit(cast, [large, *small[LOOK_PAST:]], budget=90) == []
    assert admit(cast, [large, *small[LOOK_PAST:]], budget=120)[0] is large


def test_one_that_does_not_fit_is_passed_for_a_while_only() -> None:
    cast = Cast()
    large, first, second = candidates_of(cast, 400, 4, 4)
    assert admit(cast, [large, first], budget=90, now_s=7.0) == [first]
    assert admit(cast, [large, second], budget=90, now_s=7.0 + LOOK_PAST_S) == []


def test_one_that_no_instance_with_that_quarantine_can_hold_keeps_nobody_out() -> None:
    cast = Cast()
    large, *small = candidates_of(cast, 400, *[4] * (2 * LOOK_PAST))
    room = Room(whole=99, budget=90, free=90, slots=100)
    assert to_admit([large, *small], cast.book, cast.growth, room, now_s=LOOK_PAST_S) == small
    assert (large.passed, large.blocked_s) == (0, None)


def test_what_the_retracted_ones_need_is_set_aside() -> None:
    cast = Cast()
    cast.add(RETRACTED, prompt=40, made=1)  # 10 pages, and 2 to go on
    (new,) = candidates_of(cast, 4)  # 1 page, and 2
    assert admit(cast, [new], budget=14) == []
    assert admit(cast, [new], budget=15) == [new]


def resume(cast: Cast, pages: int, slots: int = 100) -> list[DecodeSequence]:
    return to_resume(cast.book, cast.growth, Room(whole=1000, budget=pages, free=pages, slots=slots))


def test_the_oldest_is_resumed_first_and_nobody_before_it() -> None:
    cast = Cast()
    cast.add(RUNNING, made=5)
    young = cast.add(RETRACTED, prompt=4, made=1, arrived_s=9.0)  # 1 + 2 pages
    old = cast.add(RETRACTED, prompt=40, made=1, arrived_s=3.0)  # 10 + 2
    assert resume(cast, pages=11) == []
    assert resume(cast, pages=12) == [old]
    assert resume(cast, pages=15) == [old, young]
    assert resume(cast, pages=15, slots=1) == [old]
    old.in_flight = 1
    assert resume(cast, pages=15) == []
    old.in_flight, old.copying = 0, {1}
    assert resume(cast, pages=15) == []


def test_if_nothing_runs_room_to_go_on_for_a_while_is_enough() -> None:
    cast = Cast()
    cast.growth.set_conservativeness(10.0)
    old, _ = (cast.add(RETRACTED, prompt=40, made=1) for _ in range(2))
    assert resume(cast, pages=11) == []
    assert resume(cast, pages=12) == [old]
    cast.add(RUNNING, made=5)
    assert resume(cast, pages=12) == []


def test_priority_counts_against_age_and_recomputing_before_both() -> None:
    cast = Cast()
    plain = cast.add(arrived_s=10.0)
    urgent = cast.add(arrived_s=25.0, priority=2)
    late = cast.add(arrived_s=31.0, priority=2)
    again = cast.add(arrived_s=90.0, priority=-9, recompute=True)
    order = sorted(cast.book, key=lambda s: s.turn(10.0))
    assert order == [again, urgent, plain, late]


def test_the_setting_scales_what_is_expected_and_counts_at_once() -> None:
    growth, cast = Growth(PAGE), Cast()
    sequence = cast.add(prompt=4, limit=101)
    assert growth.tokens(sequence) == 100
    growth.set_conservativeness(0.5)
    assert growth.tokens(sequence) == 50
    growth.set_conservativeness(0.0)
    assert growth.tokens(sequence) == growth.run_on == 8
    growth.set_conservativeness(10.0)
    assert growth.tokens(sequence) == 100  # the limit
    sequence.recompute = True
    growth.set_conservativeness(0.1)
    assert growth.tokens(sequence) == 100  # once is enough


@pytest.mark.parametrize("value", [-0.1, 10.1, float("nan")])
def test_a_setting_out_of_its_limits_is_rejected_by_name(value: float) -> None:
    growth = Growth(PAGE)
    with pytest.raises(Rejected, match=r"^schedule_conservativeness: must be in 0..10, got"):
        growth.set_conservativeness(value)
    assert growth.conservativeness == 1.0
