"""When a prefill scheduler issues a chunk that is not full."""

from __future__ import annotations

from tests.support.prefill_events import finish
from tests.support.prefill_prompt import SimPrompt
from tests.support.prefill_sim import PrefillSim


def announced(sim: PrefillSim, num_tokens: int) -> SimPrompt:
    """A prompt that may start once it is `filled`."""
    prompt = sim.submit(num_tokens)
    sim.poll()
    sim.reserved(prompt)
    sim.poll()
    return prompt


def sizes(sim: PrefillSim) -> list[int]:
    return [step.num_tokens for step in sim.chunks]


def test_idle_stages_get_what_there_is() -> None:
    sim = PrefillSim(num_stages=2, num_pages=40, chunk_size=8)
    first, second, _ = (announced(sim, 3) for _ in range(3))
    for prompt in (first, second):
        sim.filled(prompt)
        sim.poll()
    assert sizes(sim) == [3, 3]


def test_a_chunk_that_runs_ahead_waits_for_prompts_that_are_coming() -> None:
    sim = PrefillSim(num_stages=2, num_pages=40, chunk_size=8)
    prompts = [announced(sim, num_tokens) for num_tokens in (3, 3, 4, 4)]
    for prompt in prompts[:2]:
        sim.filled(prompt)
        sim.poll()
    sim.filled(prompts[2])
    sim.poll()
    assert sizes(sim) == [3, 3], "one more may fill it"
    sim.filled(prompts[3])
    sim.poll()
    assert sizes(sim) == [3, 3, 8]
    finish(sim)


def test_a_chunk_that_runs_ahead_does_not_wait_for_nobody() -> None:
    sim = PrefillSim(num_stages=2, num_pages=40, chunk_size=8)
    prompts = [announced(sim, 3) for _ in range(3)]
    for prompt in prompts:
        sim.filled(prompt)
        sim.poll()
    assert sizes(sim) == [3, 3, 3]
    finish(sim)


def test_a_prompt_that_got_pages_is_announced_though_others_have_come_before_it() -> None:
    """Else it would hold pages there that those before it wait for: neither would ever start."""
    sim = PrefillSim(num_stages=1, num_pages=60, chunk_size=8, reserve_ahead=1)
    late = sim.submit(5)
    assert sim.poll().reserve == ["t0"]
    for _ in range(2):
        sim.submit(20, recompute=True)  # as much as is asked ahead for, and before it in the order
    assert sim.poll().reserve == ["t1"]
    sim.reserved(late)
    assert sim.poll().fill == ["t0"]
    sim.filled(late)
    sim.poll()
    assert [step.num_tokens for step in sim.chunks] == [5]
