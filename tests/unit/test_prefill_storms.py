"""The scheduler of a prefill instance in any order of events: every prompt has its token, every page comes back."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from stagemesh.shared.core.sampling import SamplingParams
from tests.support.prefill_events import UNUSUAL, USUAL, events, finish
from tests.support.prefill_sim import PrefillSim
from tests.support.sim_stages import VOCAB_SIZE


class PrefillMachine(RuleBasedStateMachine):
    """Routers, the broker, senders and stages act in any order; at the end all is brought to its end."""

    sim: PrefillSim

    @initialize(
        num_stages=st.integers(1, 3),
        num_pages=st.integers(4, 12),
        chunk_size=st.integers(1, 12),
        min_chunk_size=st.none() | st.integers(1, 12),
        max_sequences=st.integers(1, 4),
        reserve_ahead=st.integers(1, 3),
        run_ahead=st.integers(0, 2),
        prefix_cache=st.booleans(),
    )
    def build(self, **sizes: Any) -> None:
        self.sim = PrefillSim(**sizes)

    @rule(
        num_tokens=st.integers(0, 20),
        stop=st.booleans(),
        ticket=st.integers(0, 3),
        group=st.sampled_from("de"),
        family=st.none() | st.tuples(st.sampled_from("fg"), st.integers(1, 20)),
        recompute=st.booleans(),
        priority=st.integers(-3, 3),
    )
    def arrive(self, num_tokens: int, stop: bool, ticket: int, group: str, **standing: Any) -> None:
        stops = tuple(range(VOCAB_SIZE // 2)) if stop else ()
        sampling = SamplingParams(max_tokens=4 if ticket else 1, stop_token_ids=stops)
        self.sim.submit(num_tokens, sampling, ticket=ticket > 0, group=group, **standing)

    @rule()
    def flush(self) -> None:
        self.sim.flush()

    @rule(kind=st.sampled_from(USUAL + UNUSUAL), pick=st.integers(0, 100))
    def event(self, kind: str, pick: int) -> None:
        if possible := events(self.sim, kind):
            possible[pick % len(possible)]()

    @rule()
    def the_broker_answers(self) -> None:
        for kind in ("reserved", "filled"):
            self.sim.poll()
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


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def storm(sim: PrefillSim, dice: random.Random, num_events: int) -> None:
    """Many events, weighted so that most prompts get far."""
    for _ in range(num_events):
        match dice.choices(("new", "poll", "move", "deliver", "unusual", "usual"), (3, 20, 30, 20, 0.4, 30))[0]:
            case "new" if sum(not prompt.over for prompt in sim.prompts) < 8:
                family = (dice.choice("fgh"), dice.randint(1, 24)) if dice.random() < 0.7 else None
                sim.submit(dice.randint(1, 24), ticket=dice.random() < 0.8, group=dice.choice("de"), family=family)
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
@given(seed=st.integers(0, 1 << 32), num_stages=st.integers(1, 4), num_pages=st.sampled_from([6, 10, 20]))
def test_after_a_storm_every_prompt_has_its_token_and_every_page_is_back(
    seed: int, num_stages: int, num_pages: int
) -> None:
    sim = PrefillSim(num_stages=num_stages, num_pages=num_pages, min_chunk_size=1 + seed % 8)
    storm(sim, random.Random(seed), 1_200)
    finish(sim)


def test_in_a_storm_much_is_shared() -> None:
    """Else the storms would say nothing about it."""
    sim = PrefillSim(num_stages=2, num_pages=20)
    storm(sim, random.Random(1), 6_000)
    finish(sim)
    stats = sim.scheduler.stats
    assert stats.cached_tokens > 0.1 * stats.prompt_tokens > 0
    assert sim.scheduler.evicted_pages > 50
