"""Several answers to one request, and what later attempts are told of earlier ones, by a whole router and toy heads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from stagemesh.services.router.generator import GeneratorService
from stagemesh.services.router.merged import merged
from stagemesh.shared.codec.commands import sampling_from_pb
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.errors import Exhausted, Rejected, Retryable
from stagemesh.shared.obs import metrics
from stagemesh.shared.pb import generator_pb2
from tests.support.toy_mesh import ToyMesh, undisturbed
from tests.unit.test_router_generate import PROMPT, ask, at, folder, model, request_of, run, value

__all__ = ["folder", "model"]  # fixtures


def test_each_answer_draws_with_a_seed_of_its_own_and_usage_is_summed(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        tokens: dict[int, list[int]] = {}
        ends: list[generator_pb2.Finished] = []
        async for response in router.Generate(request_of(PROMPT, 20, n=4, seed=2**64 - 2, request_id="r"), None):
            assert response.request_id == "r"
            tokens.setdefault(response.index, []).extend(response.token_ids)
            if response.HasField("finished"):
                ends.append(response.finished)
        seeds = (2**64 - 2, 2**64 - 1, 0, 1)
        assert tokens == {index: undisturbed(PROMPT, 20, seed) for index, seed in enumerate(seeds)}
        assert [end.usage.completion_tokens for end in ends] == [20] * 4
        assert [end.HasField("total_usage") for end in ends] == [False, False, False, True]
        total = ends[-1].total_usage
        assert (total.prompt_tokens, total.completion_tokens) == (len(PROMPT), 80)
        asked = [sampling_from_pb(submit.sampling).prompt_logprobs for submit in mesh.prefill.submits]
        assert asked == [None] * 4

    run(folder, model, work)


def test_the_first_answer_alone_tells_of_the_prompt(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        await ask(router, request_of(PROMPT, 5, n=3, prompt_logprobs=2))
        asked = [sampling_from_pb(submit.sampling).prompt_logprobs for submit in mesh.prefill.submits]
        assert sorted(asked, key=str) == [2, None, None]

    run(folder, model, work)


def test_an_abort_ends_all_answers_and_their_name_is_taken_until_then(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        reasons: list[str] = []
        aborted = False
        async for response in router.Generate(request_of(PROMPT, 50_000, n=3, request_id="r"), None):
            if not aborted and len(mesh.decode.live) == 3:
                aborted = True
                for count in (1, 2):
                    with pytest.raises(Rejected, match="'r' is in use by a live request"):
                        await ask(router, request_of(PROMPT, 5, request_id="r", n=count))
                reply = await router.Abort(generator_pb2.AbortRequest(request_id="r"), None)
                assert reply.was_live
            if response.HasField("finished"):
                reasons.append(generator_pb2.FinishReason.Name(response.finished.finish_reason))
        assert reasons == ["FINISH_REASON_ABORT"] * 3
        assert not (await router.Abort(generator_pb2.AbortRequest(request_id="r"), None)).was_live
        await ask(router, request_of(PROMPT, 5, request_id="r", n=2))

    run(folder, model, work)


def test_a_name_is_taken_until_the_last_answer_has_ended(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        stop = undisturbed(PROMPT, 3, 0)[2]  # of the first answer
        reasons: dict[int, str] = {}
        async for response in router.Generate(
            request_of(PROMPT, 20_000, n=2, request_id="r", stop_token_ids=[stop]), None
        ):
            if not response.HasField("finished"):
                continue
            reasons[response.index] = generator_pb2.FinishReason.Name(response.finished.finish_reason)
            if len(reasons) == 1:
                assert router.num_live == 1
                for count in (1, 2, 3):
                    with pytest.raises(Rejected, match="request_id: 'r' is in use by a live request"):
                        await ask(router, request_of(PROMPT, 5, request_id="r", n=count))
                assert (await router.Abort(generator_pb2.AbortRequest(request_id="r"), None)).was_live
        assert reasons == {0: "FINISH_REASON_STOP", 1: "FINISH_REASON_ABORT"}
        assert value(router, metrics.REQUESTS, "rejected") == 3
        await ask(router, request_of(PROMPT, 5, request_id="r"))

    run(folder, model, work)


def test_several_answers_are_not_to_be_had_under_the_name_of_one(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        reasons: list[str] = []
        async for response in router.Generate(request_of(PROMPT, 50_000, request_id="r"), None):
            if response.HasField("finished"):
                reasons.append(generator_pb2.FinishReason.Name(response.finished.finish_reason))
            elif router.num_live and not reasons:
                with pytest.raises(Rejected, match="request_id: 'r' is in use by a live request"):
                    await ask(router, request_of(PROMPT, 5, request_id="r", n=2))
                assert (await router.Abort(generator_pb2.AbortRequest(request_id="r"), None)).was_live
        assert reasons == ["FINISH_REASON_ABORT"]

    run(folder, model, work)


def test_a_client_that_goes_away_takes_all_answers_with_it(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        async with aclosing(router.Generate(request_of(PROMPT, 50_000, n=3), None)) as stream:
            await anext(stream)
            assert router.num_live == 3

    run(folder, model, work)


def test_one_that_fails_ends_all(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        with pytest.raises((Retryable, ExceptionGroup), match=r"told to|unhandled errors"):
            await ask(router, request_of(PROMPT, 1_000, n=3))

    run(folder, model, work, disturb=at(20, end=SequenceEnd.FAILED))


def test_there_is_room_for_all_answers_or_for_none(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        with pytest.raises((Exhausted, ExceptionGroup)):
            await ask(router, request_of(PROMPT, 5, n=4))
        assert not mesh.prefill.submits
        await ask(router, request_of(PROMPT, 5, n=3))

    run(folder, model, work, max_live_requests=3)


@pytest.mark.parametrize("end", [SequenceEnd.RECOMPUTE, SequenceEnd.LOST])
def test_a_later_attempt_is_told_what_is_output_and_what_was_the_prompt(
    folder: Path, model: Path, end: SequenceEnd
) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        await ask(router, request_of(PROMPT, 30, repetition_penalty=1.5))
        seen: list[SamplingParams] = []
        for submit in mesh.prefill.submits:
            params = sampling_from_pb(submit.sampling)
            seen.append(params)
            assert params.prompt_ids == tuple(PROMPT)
            assert submit.prompt_tokens == len(PROMPT) + len(params.generated)
        assert [len(params.generated) for params in seen] == [0, 10 - len(PROMPT), 20 - len(PROMPT)]
        made = undisturbed(PROMPT, 30)
        assert all(list(params.generated) == made[: len(params.generated)] for params in seen)
        mesh.prefill.submits.clear()
        mesh.decode.disturb = at(10, end=end)
        await ask(router, request_of(PROMPT, 30))
        assert [sampling_from_pb(submit.sampling).generated for submit in mesh.prefill.submits] == [(), ()]

    run(folder, model, work, disturb=at(10, 20, end=end))


def test_merged_streams_end_together() -> None:
    closed: list[int] = []

    async def count(number: int, most: int) -> AsyncGenerator[int, None]:
        try:
            for value in range(most):
                yield 100 * number + value
                await asyncio.sleep(0)
        finally:
            closed.append(number)

    async def failing() -> AsyncGenerator[int, None]:
        yield -1
        raise Retryable("told to")

    async def work() -> None:
        whole = [value async for value in merged([count(1, 3), count(2, 5)])]
        assert sorted(whole) == [100, 101, 102, 200, 201, 202, 203, 204]
        assert sorted(closed) == [1, 2]
        closed.clear()
        async with aclosing(merged([count(number, 10_000) for number in range(4)])) as stream:
            await anext(stream)
            await anext(stream)
        assert sorted(closed) == [0, 1, 2, 3]
        closed.clear()
        with pytest.raises(ExceptionGroup) as caught:
            _ = [value async for value in merged([count(1, 10_000), failing()])]
        assert isinstance(caught.value.exceptions[0], Retryable)
        assert closed == [1]

    asyncio.run(work())
