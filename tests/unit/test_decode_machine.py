"""The scheduler of a decode instance in any order of events: every page is in its place, nobody starves, and the tokens
are right.

Nobody starves: of those that run the oldest is never retracted; a retracted sequence is resumed before any younger,
and nobody new is admitted at its cost; a request that waits for pages is passed by at most LOOK_PAST that come after
it. So once nobody comes any more, all end within a bounded number of rounds, which the simulation counts.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from stagemesh.shared.core.sampling import SamplingParams
from tests.support.decode_events import KINDS, events, finish
from tests.support.decode_sim import DecodeSim

SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    ignore_eos=st.booleans(),
    eos_token_ids=st.sampled_from([(), (), (0,), (0, 1, 2)]),
    stop_token_ids=st.sampled_from([(), (), (3,)]),
    min_tokens=st.integers(0, 3),
)


class DecodeMachine(RuleBasedStateMachine):
    """Routers, the broker, writers and stages act in any order; at the end all is brought to its end."""

    sim: DecodeSim

    @initialize(
        num_stages=st.integers(1, 3),
        num_pages=st.sampled_from([14, 18, 6]),
        max_running=st.sampled_from([6, 3]),
        run_ahead=st.integers(0, 3),
        extra_depth=st.integers(0, 1),
        host_pages=st.sampled_from([0, 6, 1_000]),
        crowd=st.lists(st.tuples(st.integers(1, 12), st.integers(18, 40)), min_size=3, max_size=8),
    )
    def build(self, crowd: list[tuple[int, int]], **sizes: int) -> None:
        """The crowd is there from the start, and wants more than there is."""
        self.sim = DecodeSim(**sizes, conservativeness=0.1)
        for prompt_tokens, max_tokens in crowd:
            self.sim.new_request(prompt_tokens, SamplingParams(max_tokens=max_tokens))
        self.all_start()

    @rule(
        prompt_tokens=st.integers(1, 12),
        sampling=SAMPLINGS,
        priority=st.sampled_from([0, 0, 0, -5, 5]),
        far=st.integers(0, 3),
    )
    def arrive(self, prompt_tokens: int, sampling: SamplingParams, priority: int, far: int) -> None:
        """A request, and how far it gets at once."""
        request = self.sim.new_request(prompt_tokens, sampling, priority)
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

    @rule(pick=st.integers(0, 10))
    def finish_copy(self, pick: int) -> None:
        if ranks := self.sim.pipeline.copying():
            self.sim.finish_copy(ranks[pick % len(ranks)], pick)

    @rule(pick=st.integers(0, 10))
    def deliver_copied(self, pick: int) -> None:
        if self.sim.pipeline.copied:
            self.sim.deliver_copied(pick)

    @rule(value=st.sampled_from([0.0, 0.1, 0.5, 1.0, 4.0]))
    def set_conservativeness(self, value: float) -> None:
        self.sim.scheduler.schedule_conservativeness = value

    @rule(depth=st.integers(0, 2))
    def set_extra_depth(self, depth: int) -> None:
        self.sim.set_extra_depth(depth)

    @rule(count=st.integers(1, 6))
    def set_max_running(self, count: int) -> None:
        """Those that run already go on."""
        self.sim.scheduler.settings.set("max_running", min(count, self.sim.max_running))

    @rule()
    def all_start(self) -> None:
        """Everybody who has come is brought as far as it can get: so there are enough to run out of pages."""
        for _ in range(3):
            for kind in ("submit", "reserve", "fill", "write", "commit", "first_token"):
                while possible := events(self.sim, kind):
                    possible[0]()
                    self.sim.poll()

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
TestDecode.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


@pytest.mark.full
def test_a_hundred_thousand_steps() -> None:
    many = settings(max_examples=1_000, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(DecodeMachine, settings=many)
