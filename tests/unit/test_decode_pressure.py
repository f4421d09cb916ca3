"""A decode instance whose pool is far too small for what comes: everybody finishes, with the tokens of a calm run."""

from __future__ import annotations

import random

import pytest

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.engine.schedule.output import SequenceEnd
from tests.support.decode_events import go_on
from tests.support.decode_request import SimRequest
from tests.support.decode_sim import DecodeSim

PAGE = 4


def crowd(sim: DecodeSim, count: int, *, seed: int = 0) -> list[SimRequest]:
    """Requests of 4..20 prompt tokens and up to 200 new ones, of which some end earlier."""
    dice = random.Random(seed)
    sizes = [(dice.randint(4, 20), dice.randint(20, 200), dice.choice([0, 99, 99])) for _ in range(count)]
    return [
        sim.new_request(prompt_tokens, SamplingParams(max_tokens=max_tokens, eos_token_ids=(eos,)))
        for prompt_tokens, max_tokens, eos in sizes
    ]


def need_of(requests: list[SimRequest]) -> int:
    """Pages for all of them at once, each at its end."""
    return sum(pages_for(r.prompt_tokens + len(r.expected[0]) - 1, PAGE) for r in requests)


def run(sim: DecodeSim) -> None:
    """Prefill and the broker keep up with what is asked; everything moves at the same pace, to the end."""
    for request in sim.requests:
        sim.submit(request)
    for _ in range(1_000_000):
        before = sim.progress
        for request in list(sim.requests):
            if request.end is None:
                go_on(sim, request)
        sim.crank()
        if sim.progress == before and sim.pipeline.quiet:
            break
    sim.check_all_is_back()


@pytest.mark.parametrize(
    ("num_stages", "host_share"),
    [(2, 5.0), (3, 0.2), (2, 0.0)],
    ids=["host memory", "too little of it", "none"],
)
def test_a_storm_in_an_eighth_of_the_pool(num_stages: int, host_share: float) -> None:
    count = 60
    probe = DecodeSim(num_stages=1, num_pages=1_000)
    pages = need_of(crowd(probe, count)) // 8
    sim = DecodeSim(
        num_stages=num_stages,
        num_pages=pages,
        max_running=count,
        host_pages=int(host_share * pages),
        conservativeness=0.1,
    )
    requests = crowd(sim, count)
    run(sim)
    stats = sim.scheduler.stats
    assert stats.retractions + stats.recomputed > 15
    assert (stats.retractions > 0, stats.recomputed > 0) == (host_share > 0, host_share < 1)
    assert 0 <= stats.retractions - stats.resumed < 5  # few end by a result that was on its way
    ended = [request for request in sim.requests if request.end is SequenceEnd.RECOMPUTE]
    assert len(ended) == stats.recomputed
    assert all(request.end is not None or len(request.expected[0]) == 1 for request in requests)
