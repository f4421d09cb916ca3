"""A request whose attempt ends early runs on from the tokens there are, and its client sees one answer."""

from __future__ import annotations

import asyncio

import pytest

from stagemesh.services.router.attempt import Wanted
from stagemesh.services.router.request import Ending, LiveRequest
from stagemesh.shared.core.commands import TokenLogprobs
from stagemesh.shared.core.identity import InstanceRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.errors import Exhausted, Rejected, Retryable
from tests.support.live_requests import begun

RECOMPUTE = SequenceEnd.RECOMPUTE
SAMPLING = SamplingParams(max_tokens=9, min_tokens=5, seed=7, temperature=1.0)


def take(live: LiveRequest) -> tuple[list[int], Ending | None]:
    fresh, ending = asyncio.run(live.next())
    return [token_id for token_id, _ in fresh], ending


def test_the_next_attempt_makes_what_is_left_after_prompt_and_tokens() -> None:
    live, attempts = begun([1, 2], SAMPLING)
    attempts.say(10)
    attempts.say(11)
    attempts.say(12, end=RECOMPUTE)  # tokens that come with it count
    assert len(attempts.all) == 2
    wanted = attempts.last.wanted
    assert wanted.token_ids == [1, 2, 10, 11, 12]
    assert (wanted.sampling.max_tokens, wanted.sampling.min_tokens, wanted.sampling.seed) == (6, 2, 7)
    assert wanted.recompute
    assert (wanted.request_id, wanted.arrived_s) == (live.wanted.request_id, live.wanted.arrived_s)
    assert live.recomputed_tokens == 4
    attempts.say(13)
    attempts.say(14, end=RECOMPUTE)
    assert attempts.last.wanted.token_ids == [1, 2, 10, 11, 12, 13, 14]
    assert attempts.last.wanted.sampling.max_tokens == 4
    assert attempts.last.wanted.sampling.min_tokens == 0
    attempts.say(15, end=SequenceEnd.LENGTH)
    assert take(live) == ([10, 11, 12, 13, 14, 15], Ending(SequenceEnd.LENGTH))
    assert (live.more_attempts, live.recomputed_tokens, live.completion_tokens) == (2, 4 + 6, 6)


def test_a_client_that_waits_is_told_nothing_of_it() -> None:
    async def run() -> None:
        live, attempts = begun([1], SAMPLING)
        attempts.say(10)
        await live.next()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(live.next())
            await asyncio.sleep(0)
            attempts.say(end=RECOMPUTE)
            await asyncio.sleep(0)
            assert not waiting.done()
            attempts.say(11)
        assert waiting.result() == ([(11, None)], None)

    asyncio.run(run())


def test_what_the_client_hears_of_prompt_cache_and_time_is_of_the_first_attempt() -> None:
    served = []
    live, attempts = begun([1, 2, 3, 4], SAMPLING, on_first_token=lambda: served.append(True))
    attempts.say(10, cached_tokens=2, logprobs=[TokenLogprobs(-1.0, (), ())])
    first_token_s = live.first_token_s
    attempts.say(end=RECOMPUTE)
    attempts.say(11, cached_tokens=4, logprobs=[TokenLogprobs(-2.0, (), ())])
    assert live.token_ids == [1, 2, 3, 4]
    assert (live.cached_tokens, live.first_token_s, served) == (2, first_token_s, [True])
    fresh, _ = asyncio.run(live.next())
    assert [said.logprob for _, said in fresh if said is not None] == [-1.0, -2.0]


def test_late_outputs_of_an_attempt_that_is_over_are_dropped() -> None:
    live, attempts = begun([1], SAMPLING)
    attempts.say(10)
    attempts.say(end=RECOMPUTE)
    for end in (None, RECOMPUTE, SequenceEnd.STOP, SequenceEnd.FAILED):
        attempts.say(66, end=end, attempt=attempts.all[0])
    attempts.all[0]._owner.on_failure(attempts.all[0], Retryable("too late"))
    assert len(attempts.all) == 2
    attempts.say(11)
    assert take(live) == ([10, 11], None)


def test_a_request_that_is_over_does_not_run_on() -> None:
    aborted, attempts = begun([1], SAMPLING)
    attempts.say(10)
    aborted.abort()
    attempts.say(end=RECOMPUTE)
    assert (len(attempts.all), take(aborted)) == (1, ([10], Ending(None)))
    released, attempts = begun([1], SAMPLING)
    attempts.say(10)
    released.release()
    attempts.say(end=RECOMPUTE)
    assert len(attempts.all) == 1


def test_an_abort_while_it_is_run_again_ends_it() -> None:
    live, attempts = begun([1], SAMPLING)
    attempts.say(10)
    attempts.say(end=RECOMPUTE)
    live.abort()
    attempts.say(11)
    assert take(live) == ([10], Ending(None))


@pytest.mark.parametrize(
    ("end", "error", "kind"),
    [(SequenceEnd.FAILED, "it is lost", Retryable), (SequenceEnd.REJECTED, "max_tokens: too many", Rejected)],
)
def test_a_failure_ends_it_after_the_tokens_there_are(end: SequenceEnd, error: str, kind: type[Exception]) -> None:
    live, attempts = begun([1], SAMPLING)
    attempts.say(10)
    attempts.say(end=RECOMPUTE)
    attempts.say(end=end, error=error)
    assert take(live) == ([10], None)
    with pytest.raises(kind, match=error):
        take(live)


def test_an_attempt_that_cannot_be_sent_off_fails_its_request() -> None:
    live, attempts = begun([1], SAMPLING)
    attempts.last._owner.on_failure(attempts.last, Exhausted("full"))
    live.abort()  # the first end counts
    with pytest.raises(Exhausted, match="full"):
        take(live)


def test_what_is_left_of_a_request_never_has_negative_limits() -> None:
    wanted = Wanted("r", SamplingParams(max_tokens=3, min_tokens=1), [1, 2], priority=4)
    rest = wanted.continued([5, 6], recompute=True)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens, rest.priority) == (1, 0, 4)
    assert wanted.token_ids == [1, 2]


def test_a_lost_attempt_runs_on_from_what_was_made_and_avoids_the_instance() -> None:
    live, attempts = begun([1, 2], SAMPLING)
    first, second = InstanceRef("d0", 1), InstanceRef("d1", 4)
    attempts.last.on_lost(first, "d0 is lost")
    assert (attempts.last.wanted.token_ids, attempts.last.wanted.recompute) == ([1, 2], False)
    attempts.say(10)
    attempts.all[0].on_lost(first, "of an attempt that is over")
    attempts.last.on_lost(second, "d1 is lost")
    assert (attempts.last.wanted.token_ids, attempts.last.wanted.recompute) == ([1, 2, 10], True)
    assert attempts.last.wanted.lost_on == {first, second}
    attempts.say(11, end=RECOMPUTE)
    assert attempts.last.wanted.lost_on == {first, second}
    attempts.say(12)
    assert take(live) == ([10, 11, 12], None)
    attempts.last.on_lost(first, "d0 is lost again")
    with pytest.raises(Retryable, match="d0 is lost again; that was the last of 3 attempts"):
        take(live)
    assert len(attempts.all) == 4


def test_what_cannot_be_sent_off_after_a_loss_says_what_was_lost() -> None:
    live, attempts = begun([1], SAMPLING)
    attempts.last.on_lost(InstanceRef("d0", 1), "d0 is lost")
    attempts.last._owner.on_failure(attempts.last, Retryable("no decode instance is there"))
    with pytest.raises(Retryable, match="d0 is lost; no decode instance is there"):
        take(live)
