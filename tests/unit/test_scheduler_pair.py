"""Both schedulers and a broker with slow answers: whatever comes first, they do not wait for each other for good."""

from __future__ import annotations

import time

import pytest

from tests.support.pair_sim import PairSim

NUM_REQUESTS = 60


@pytest.mark.parametrize("host_pages", [0, 6, 100])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_in_a_pool_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, seed: int, host_pages: int
) -> None:
    run_one(monkeypatch, seed, host_pages, NUM_REQUESTS)


@pytest.mark.full
@pytest.mark.parametrize("host_pages", [0, 6, 100])
def test_every_request_ends_many_times(monkeypatch: pytest.MonkeyPatch, host_pages: int) -> None:
    for seed in range(100, 130):
        run_one(monkeypatch, seed, host_pages, 2 * NUM_REQUESTS)


def run_one(monkeypatch: pytest.MonkeyPatch, seed: int, host_pages: int, num_requests: int) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    sim = PairSim(seed, clock, num_requests=num_requests, num_pages=24, host_pages=host_pages)
    assert sim.run(), f"the pair stands still: prefill {sim.prefill.by_state}, decode {sim.decode.by_state}"
    sim.prefill.check_integrity()
    sim.decode.check_integrity()
    assert host_pages > 6 or sim.recomputed > 0, "nothing was under pressure"
