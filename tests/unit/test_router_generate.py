"""A whole router against toy heads: requests that wait, are refused, are run again, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from stagemesh.services.router.generator import GeneratorService
from stagemesh.shared.config import RouterSection
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.errors import Exhausted, Rejected
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.metrics import Metric
from stagemesh.shared.obs.tally import Distribution
from stagemesh.shared.pb import generator_pb2
from tests.support.client import Answer, token_request
from tests.support.tiny_models import make_tiny
from tests.support.toy_mesh import Disturb, ToyMesh, toy_router, undisturbed

LIMIT_S = 60.0
RECOMPUTE = SequenceEnd.RECOMPUTE
PROMPT = [5, 6, 7, 8]
Work = Callable[[GeneratorService, ToyMesh], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=1, max_context=1 << 16)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # a short path: of unix sockets


def run(
    folder: Path,
    model: Path,
    work: Work,
    *,
    disturb: Disturb | None = None,
    prefill_pages: int = 1 << 16,
    pairs: int = 1,
    dead_stages: Collection[str] = (),
    **section: Any,
) -> None:
    """`work` on a router; nothing of it may be left at the end."""

    async def go() -> None:
        mesh = ToyMesh(
            disturb or (lambda request_id, num_tokens: None),
            prefill_pages=prefill_pages,
            pairs=pairs,
            dead_stages=dead_stages,
        )
        async with asyncio.timeout(LIMIT_S), toy_router(folder, model, mesh, RouterSection(**section)) as router:
            await work(router, mesh)
            assert router.num_live == router.num_waiting == 0
            router.check_integrity()
            await mesh.settled()

    asyncio.run(go())


def request_of(prompt: list[int], max_tokens: int, **options: Any) -> generator_pb2.GenerateRequest:
    return token_request(prompt, max_tokens, **{"seed": 0, **options})


async def ask(router: GeneratorService, request: generator_pb2.GenerateRequest) -> Answer:
    answer = Answer()
    async for response in router.Generate(request, None):
        router.check_integrity()
        answer.token_ids += response.token_ids
        answer.text += response.text
        if response.HasField("finished"):
            answer.finished = response.finished
            answer.reason = generator_pb2.FinishReason.Name(response.finished.finish_reason)
    return answer


def value(router: GeneratorService, metric: Metric, *labels: str) -> Any:
    (found,) = [s.value for s in router.records.measure() if s.metric is metric and s.labels == labels]
    return found


def every(count: int) -> Disturb:
    """Takes a sequence's KV away at most places that are a multiple of `count`."""
    rng = random.Random(1)
    return lambda request_id, num_tokens: RECOMPUTE if num_tokens % count == 0 and rng.random() < 0.7 else None


def at(*num_tokens: int, end: SequenceEnd = RECOMPUTE) -> Disturb:
    """Takes a sequence's KV away, once each, when it has so many tokens with its prompt."""
    left = list(num_tokens)

    def disturb(request_id: str, count: int) -> SequenceEnd | None:
        if count in left:
            left.remove(count)
            return end
        return None

    return disturb


def test_an_answer_is_the_same_however_often_its_kv_is_lost(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        requests = [
            request_of([*PROMPT, n], 40, seed=n, priority=n - 5, request_id=f"r{n}", whole=n % 3 == 0)
            for n in range(10)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(router, request)) for request in requests]
        for n, task in enumerate(tasks):
            answer = task.result()
            assert answer.token_ids == undisturbed([*PROMPT, n], 40, n)
            assert answer.reason == "FINISH_REASON_LENGTH"
            assert answer.finished is not None
            usage = answer.finished.usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 40, 2)
        assert value(router, metrics.MORE_ATTEMPTS) > 10
        assert value(router, metrics.MORE_ATTEMPTS) == len(mesh.prefill.submits) - 10
        again = [submit for submit in mesh.prefill.submits if submit.recompute]
        assert len(again) == value(router, metrics.MORE_ATTEMPTS)
        assert value(router, metrics.RECOMPUTED_TOKENS) == sum(submit.prompt_tokens - 1 for submit in again)
        attempts = [submit.request.attempt for submit in mesh.prefill.submits]
        assert len(set(attempts)) == len(attempts)
        for head in (mesh.prefill, mesh.decode):
            for submit in head.submits:
                assert submit.priority == int(submit.request.request_id[1:]) - 5
                assert submit.waited_s > 0
        by_request: dict[str, list[Any]] = {}
        for submit in mesh.decode.submits:
            by_request.setdefault(submit.request.request_id, []).append(submit)
        for submits in by_request.values():
            waited = [submit.waited_s for submit in submits]
            assert waited == sorted(waited), "it is as old as its request, whatever the attempt"
            totals = {submit.prompt_tokens + submit.sampling.max_tokens for submit in submits}
            assert totals == {45}

    run(folder, model, work, disturb=every(4))


def test_one_token_left_needs_no_ticket(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        answer = await ask(router, request_of(PROMPT, 6))
        assert answer.token_ids == undisturbed(PROMPT, 6)
        assert len(mesh.tickets) == 1
        assert [submit.ticket_id for submit in mesh.prefill.submits] == ["t0", ""]

    run(folder, model, work, disturb=at(9))


def test_logprobs_and_stop_strings_know_nothing_of_it(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        plain = await ask(router, request_of(PROMPT, 30))
        assert len(mesh.prefill.submits) == 1
        mesh.decode.disturb = at(10, 13, 18)
        middle = len(plain.text) // 2
        stop = plain.text[middle : middle + 4]
        stopped = await ask(router, request_of(PROMPT, 30, stop=[stop]))
        assert stopped.text == plain.text[: plain.text.index(stop)]
        assert stopped.reason == "FINISH_REASON_STOP"
        assert len(mesh.prefill.submits) > 2
        mesh.decode.disturb = at(10, 13, 18)
        told = []
        async for response in router.Generate(request_of(PROMPT, 30, logprobs=0), None):
            told += [(token, said.logprob) for token, said in zip(response.token_ids, response.logprobs, strict=True)]
        assert told == [(token, -float(token)) for token in undisturbed(PROMPT, 30)]

    run(folder, model, work)


@pytest.mark.parametrize("moment", ["placing", "prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_an_abort_and_a_disconnect_while_it_is_run_again_leave_nothing(
    folder: Path, model: Path, moment: str, how: str
) -> None:
    """`run` checks that nothing is left."""

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        def disturb(request_id: str, num_tokens: int) -> SequenceEnd | None:
            if num_tokens != 10 or len(mesh.tickets) > 1:
                return None
            mesh.prefill.paused = moment == "prefill"
            if moment == "placing":
                mesh.placeable.clear()
            return RECOMPUTE

        mesh.decode.disturb = disturb
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask(router, request_of(PROMPT, 5000, request_id="r")))
            if moment == "placing":
                await mesh.until(lambda: bool(mesh.decode.submits) and not mesh.placeable.is_set())
                await mesh.until(lambda: not mesh.prefill.live)
            else:
                await mesh.until(lambda: len(mesh.prefill.submits) == 2)
            if how == "abort":
                reply = await router.Abort(generator_pb2.AbortRequest(request_id="r"), None)
                assert reply.was_live
                answer = await task
                assert answer.reason == "FINISH_REASON_ABORT"
                assert answer.token_ids == undisturbed(PROMPT, len(answer.token_ids))
                assert len(answer.token_ids) >= 6
            else:
                task.cancel()
                await asyncio.wait([task])
            mesh.placeable.set()

    run(folder, model, work)


def test_what_is_over_the_limit_of_waiting_is_refused_at_once_with_a_hint(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        mesh.prefill.paused = True
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(router, request_of([*PROMPT, n], 8, seed=n))) for n in range(4)]
            await mesh.until(lambda: len(mesh.prefill.submits) == 4)
            assert value(router, metrics.WAITING_REQUESTS, "first_token") == 4
            assert value(router, metrics.OLDEST_WAITING) > 0
            for _ in range(3):
                with pytest.raises(
                    Exhausted, match=r"no more than 4 requests may wait: 4 wait .* try again in 1 s"
                ) as e:
                    await ask(router, request_of(PROMPT, 8))
                assert e.value.retry_after_s == 1.0
            # a flood costs no validation
            with pytest.raises(Exhausted):
                await ask(router, request_of([VOCAB_AND_MORE], 8))
            mesh.prefill.resume()
        for n, task in enumerate(tasks):
            assert task.result().token_ids == undisturbed([*PROMPT, n], 8, n)
        assert value(router, metrics.REQUESTS, "exhausted") == 4
        refusals = value(router, metrics.REFUSAL_SECONDS)
        assert isinstance(refusals, Distribution)
        assert refusals.count == 4
        assert value(router, metrics.WAITING_REQUESTS, "first_token") == value(router, metrics.OLDEST_WAITING) == 0

    run(folder, model, work, max_waiting_requests=4)


VOCAB_AND_MORE = 99_999


def test_those_that_have_a_token_take_no_place_among_those_that_wait(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        streams = [router.Generate(request_of([*PROMPT, n], 500, seed=n), None) for n in range(5)]
        for stream in streams:  # one may wait at a time
            await anext(stream)
        assert router.num_live == 5
        with pytest.raises(Exhausted, match="5 requests are live, which is the limit"):
            await ask(router, request_of(PROMPT, 8))
        for stream in streams:
            assert isinstance(stream, AsyncGenerator)
            await stream.aclose()

    run(folder, model, work, max_waiting_requests=1, max_live_requests=5)


@pytest.mark.parametrize("where", ["placing", "prefill"])
def test_what_gets_no_token_in_time_is_ended_everywhere(folder: Path, model: Path, where: str) -> None:
    """`run` checks that nothing is left."""

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        mesh.prefill.paused = True
        if where == "placing":
            mesh.placeable.clear()
        started_s = time.monotonic()
        with pytest.raises(Exhausted, match=r"no first token within 0\.2 s: 1 wait .* oldest for 0\.2 s") as e:
            await ask(router, request_of(PROMPT, 8, request_id="r"))
        assert time.monotonic() - started_s >= 0.2
        assert e.value.retry_after_s == 1.0
        mesh.placeable.set()
        assert value(router, metrics.REQUESTS, "exhausted") == 1
        assert value(router, metrics.REFUSAL_SECONDS).count == 0

    run(folder, model, work, max_waiting_s=0.2)


def test_a_request_that_has_had_a_token_is_never_ended_by_the_limits(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        def disturb(request_id: str, num_tokens: int) -> SequenceEnd | None:
            mesh.prefill.paused = num_tokens == 10
            return RECOMPUTE if mesh.prefill.paused else None

        mesh.decode.disturb = disturb
        stream = router.Generate(request_of(PROMPT, 12, request_id="held"), None)
        tokens = list((await anext(stream)).token_ids)
        await mesh.until(lambda: len(mesh.prefill.submits) == 2)
        assert value(router, metrics.WAITING_REQUESTS, "recompute") == 1
        waits = asyncio.create_task(ask(router, request_of(PROMPT, 8, request_id="waits")))
        with pytest.raises(Exhausted, match="no first token"):  # the time of all that wait is over
            await waits
        mesh.decode.disturb = at()
        mesh.prefill.resume()
        async for response in stream:
            tokens += response.token_ids
        assert tokens == undisturbed(PROMPT, 12)

    run(folder, model, work, max_waiting_s=0.2, max_waiting_requests=1)


def test_a_priority_out_of_range_is_named_with_its_limit(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        for priority in (-101, 101, 1 << 40):
            with pytest.raises(Rejected, match=rf"priority: must be in -100\.\.100, got {priority}"):
                await ask(router, request_of(PROMPT, 8, priority=priority))

    run(folder, model, work)


def test_a_request_that_could_not_be_run_again_is_refused_before_it_begins(folder: Path, model: Path) -> None:
    """Ten pages of four tokens: all but a request's last token must fit."""

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        with pytest.raises(Rejected, match=r"max_tokens: must be in 1\.\.37 \(41 for prompt and new tokens"):
            await ask(router, request_of(PROMPT, 38))
        answer = await ask(router, request_of(PROMPT, 37))
        assert answer.token_ids == undisturbed(PROMPT, 37)
        assert mesh.prefill.submits[-1].prompt_tokens == 40

    run(folder, model, work, disturb=at(40), prefill_pages=10)
