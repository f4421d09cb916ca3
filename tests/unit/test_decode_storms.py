"""The scheduler of a decode instance in any order of events: everything is in its place, and the tokens are right."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from stagemesh.shared.core.sampling import SamplingParams
from tests.support.decode_events import KINDS, events, finish
from tests.support.decode_sim import DecodeSim

SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    ignore_eos=st.booleans(),
    eos_token_ids=st.sampled_from([(), (0,), (0, 1, 2)]),
    stop_token_ids=st.sampled_from([(), (3,)]),
    min_tokens=st.integers(0, 3),
)


class DecodeMachine(RuleBasedStateMachine):
    """Routers, the broker, writers and stages act in any order; at the end all is brought to its end."""

    sim: DecodeSim

    @initialize(
        num_stages=st.integers(1, 3),
        num_pages=st.integers(5, 16),
        max_running=st.integers(1, 6),
        run_ahead=st.integers(0, 3),
        extra_depth=st.integers(0, 1),
    )
    def build(self, **sizes: int) -> None:
        self.sim = DecodeSim(**sizes)

    @rule(prompt_tokens=st.integers(1, 12), sampling=SAMPLINGS, far=st.integers(0, 3))
    def arrive(self, prompt_tokens: int, sampling: SamplingParams, far: int) -> None:
        """A request, and how far it gets at once."""
        request = self.sim.new_request(prompt_tokens, sampling)
        for kind in ("submit", "reserve", "first_token")[:far]:
            self.event(kind, -1)
        assert request in self.sim.requests

    @rule(kind=st.sampled_from(KINDS), pick=st.integers(0, 100))
    def event(self, kind: str, pick: int) -> None:
        if possible := events(self.sim, kind):
            possible[pick % len(possible)]()

    @rule()
    def everything_is_written(self) -> None:
        self.sim.poll()
        for kind in ("fill", "write"):
            while possible := events(self.sim, kind):
                possible[0]()

    @rule(pick=st.integers(0, 10))
    def move(self, pick: int) -> None:
        if ranks := self.sim.pipeline.movable():
            self.sim.move(ranks[pick % len(ranks)])

    @rule()
    def deliver(self) -> None:
        if self.sim.pipeline.inbox:
            self.sim.deliver()

    @rule()
    def poll(self) -> None:
        self.sim.poll()

    @rule(rounds=st.integers(1, 6))
    def crank(self, rounds: int) -> None:
        self.sim.crank(rounds)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            finish(self.sim)


TestDecode = DecodeMachine.TestCase
TestDecode.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


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
