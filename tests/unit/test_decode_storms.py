"""The scheduler of a decode instance in any order of events: everything is in its place, and the tokens are right."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.shared.core.sampling import SamplingParams
from tests.support.decode_events import events, finish
from tests.support.decode_sim import DecodeSim

USUAL = ("submit", "reserve", "fill", "write", "write", "commit", "quiesce", "first_token")
UNUSUAL = ("close", "abort", "cancel_reserve", "close_again", "abort_again")


def storm(sim: DecodeSim, dice: random.Random, num_events: int) -> None:
    """Many events, weighted so that most requests get far."""
    for _ in range(num_events):
        match dice.choices(("new", "poll", "move", "deliver", "unusual", "usual"), (4, 20, 30, 20, 0.4, 25))[0]:
            case "new" if sum(request.end is None and not request.gone for request in sim.requests) < 12:
                sampling = SamplingParams(max_tokens=dice.randint(1, 16), eos_token_ids=dice.choice([(), (0,), (0, 1)]))
                sim.new_request(dice.randint(1, 14), sampling)
            case "poll":
                sim.poll()
            case "move" if ranks := sim.pipeline.movable():
                sim.move(dice.choice(ranks))
            case "deliver" if sim.pipeline.inbox:
                sim.deliver()
            case "usual" | "unusual" as how:
                possible = [event for kind in (USUAL if how == "usual" else UNUSUAL) for event in events(sim, kind)]
                if possible:
                    dice.choice(possible)()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_stages=st.integers(1, 4), num_pages=st.sampled_from([8, 12, 24]))
def test_after_a_storm_the_tokens_are_right_and_every_page_is_back(seed: int, num_stages: int, num_pages: int) -> None:
    sim = DecodeSim(num_stages=num_stages, num_pages=num_pages)
    storm(sim, random.Random(seed), 1_200)
    finish(sim)
