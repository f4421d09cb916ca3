"""A whole router against toy heads that are lost: what they had runs on elsewhere, and its clients see one answer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from stagemesh.services.router import attempt
from stagemesh.services.router.generator import GeneratorService
from stagemesh.services.router.session import HeadSession
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.engine.schedule.output import SequenceEnd
from stagemesh.shared.errors import Retryable
from stagemesh.shared.obs import metrics
from stagemesh.shared.pb import instance_pb2
from tests.support.toy_mesh import ToyMesh, undisturbed
from tests.unit.test_router_generate import PROMPT, ask, at, folder, model, request_of, run, value

__all__ = ["folder", "model"]  # fixtures
NEW_TOKENS = 60


async def ask_many(router: GeneratorService) -> None:
    """All are answered, exactly."""
    async with asyncio.TaskGroup() as group:
        requests = [request_of([*PROMPT, n], NEW_TOKENS, seed=n) for n in range(8)]
        tasks = [group.create_task(ask(router, request)) for request in requests]
    for n, task in enumerate(tasks):
        answer = task.result()
        assert answer.token_ids == undisturbed([*PROMPT, n], NEW_TOKENS, n)
        assert answer.finished is not None
        usage = answer.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT) + 1, NEW_TOKENS)
        assert answer.reason == "FINISH_REASON_LENGTH"


def test_what_a_lost_decode_instance_had_runs_on_at_another(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        def disturb(request_id: str, num_tokens: int) -> None:
            if num_tokens == 30 and not mesh.decode.is_lost:
                mesh.lose("decode-0")

        mesh.decode.disturb = disturb
        await ask_many(router)
        assert 0 < value(router, metrics.MORE_ATTEMPTS) <= 8
        again = [submit for head in mesh.prefills for submit in head.submits if submit.recompute]
        assert again
        assert all(submit.prompt_tokens > len(PROMPT) + 1 for submit in again)
        assert value(router, metrics.REQUESTS, "error") == 0

    run(folder, model, work, pairs=2)


def test_prompts_of_a_lost_prefill_instance_run_on_at_another(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        mesh.prefill.paused = True
        async with asyncio.TaskGroup() as group:
            group.create_task(ask_many(router))
            await mesh.until(lambda: len(mesh.prefill.submits) >= 4)
            mesh.lose("prefill-0")
        assert 4 <= value(router, metrics.MORE_ATTEMPTS) <= 8
        assert not any(submit.recompute for head in mesh.prefills for submit in head.submits)

    run(folder, model, work, pairs=2)


def test_a_prefill_instance_is_not_missed_by_those_that_decode(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        def disturb(request_id: str, num_tokens: int) -> None:
            if num_tokens == 30 and not mesh.prefill.is_lost:
                mesh.lose("prefill-0")

        mesh.decode.disturb = disturb
        stream = router.Generate(request_of(PROMPT, 5_000), None)
        tokens = list((await anext(stream)).token_ids)
        await mesh.until(lambda: mesh.prefill.is_lost and not mesh.prefill.live)
        async for response in stream:
            tokens += response.token_ids
        assert tokens == undisturbed(PROMPT, 5_000)
        assert value(router, metrics.MORE_ATTEMPTS) == 0

    run(folder, model, work)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_head_may_say_that_its_pair_is_lost_as_often_as_there_are_attempts(
    folder: Path, model: Path, times: int
) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        if times < 3:
            assert (await ask(router, request_of(PROMPT, 30))).token_ids == undisturbed(PROMPT, 30)
        else:
            with pytest.raises(Retryable, match="told to; that was the last of 3 attempts"):
                await ask(router, request_of(PROMPT, 30))
        assert value(router, metrics.MORE_ATTEMPTS) == min(times, 2)

    run(folder, model, work, disturb=at(*range(10, 10 + 2 * times, 2), end=SequenceEnd.LOST), max_attempts=3)


def test_before_it_runs_where_it_was_lost_there_is_a_pause(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts in a moment are one: what broke is still broken."""
    seen: list[int] = []

    def no_pause(losses: int) -> float:
        seen.append(losses)
        return 0.0

    monkeypatch.setattr(attempt, "pause_s", no_pause)

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        assert (await ask(router, request_of(PROMPT, 30))).token_ids == undisturbed(PROMPT, 30)

    run(folder, model, work, disturb=at(10, 12, end=SequenceEnd.LOST), max_attempts=3)
    assert seen == [1, 2]


def test_pauses_double_up_to_a_bound() -> None:
    assert [attempt.pause_s(losses) for losses in (1, 2, 3, 9)] == [0.1, 0.2, 0.4, 1.0]


def test_a_lost_attempt_goes_to_the_other_pair(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once."""
    monkeypatch.setattr(attempt, "pause_s", lambda losses: pytest.fail("there is another pair"))

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        mesh.decode.disturb = at(10, end=SequenceEnd.LOST)
        await ask(router, request_of(PROMPT, 30))
        submits = [len(head.submits) for head in mesh.heads.values()]
        assert submits == [1, 1, 1, 1]

    run(folder, model, work, pairs=2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_another_instance_it_ends_at_once_with_the_reason(folder: Path, model: Path, role: str) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        mesh.prefill.paused = role == "prefill"
        task = asyncio.create_task(ask(router, request_of(PROMPT, 5_000)))
        await mesh.until(lambda: bool(mesh.heads[f"{role}-0"].submits))
        started_s = time.monotonic()
        mesh.lose(f"{role}-0")
        with pytest.raises(Retryable, match=f"{role}-0 is lost: .*; no {role} instance is there"):
            await task
        assert time.monotonic() - started_s < 2.0

    run(folder, model, work)


def test_a_failure_that_is_the_requests_own_ends_it(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        with pytest.raises(Retryable, match="told to"):
            await ask(router, request_of(PROMPT, 30))
        assert value(router, metrics.MORE_ATTEMPTS) == 0

    run(folder, model, work, disturb=at(10, end=SequenceEnd.FAILED), pairs=2)


def test_a_view_that_lags_behind_the_brokers_costs_no_attempt(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        mesh.refusals = 5
        assert (await ask(router, request_of(PROMPT, 30))).token_ids == undisturbed(PROMPT, 30)
        assert mesh.refusals == 0
        assert value(router, metrics.MORE_ATTEMPTS) == 0

    run(folder, model, work, max_attempts=3)


def test_a_structured_request_goes_to_another_instance_if_a_last_stage_does_not_answer(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and only that leg of the pair is another one."""
    monkeypatch.setattr(attempt, "pause_s", lambda losses: pytest.fail("there is another decode instance"))

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        for count in range(1, 4):
            async with asyncio.timeout(attempt.PLACEMENT_WAIT_S / 2):
                answer = await ask(router, request_of(PROMPT, 30, regex="a*"))
            assert answer.token_ids == undisturbed(PROMPT, 30)
            assert value(router, metrics.MORE_ATTEMPTS) == count
            assert [len(mesh.heads[name].submits) for name in ("decode-0", "decode-1")] == [0, count]
            if count == 1:
                assert len(mesh.prefill.submits) == 1

    run(folder, model, work, pairs=2, dead_stages=["decode-0"])


def test_without_another_last_stage_it_ends_with_the_reason(folder: Path, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        why = "the last stage of decode-0 is lost: nothing answers at .*; that was the last of 3 attempts"
        with pytest.raises(Retryable, match=why):
            await ask(router, request_of(PROMPT, 30, regex="a*"))
        assert not mesh.tickets

    run(folder, model, work, dead_stages=["decode-0"], max_attempts=3)


def cut_links(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[instance_pb2.SessionUp]:
    """Between the router and all heads. What submits are written there from now on."""
    submits: asyncio.Queue[instance_pb2.SessionUp] = asyncio.Queue()

    async def write(session: HeadSession, stream: Any) -> None:
        while True:
            message = await session._outgoing.get()
            if message.HasField("submit"):
                submits.put_nowait(message)

    monkeypatch.setattr(HeadSession, "_write", write)
    return submits


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_ticket_that_no_head_has_heard_of_is_failed_when_a_session_ends(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The link to the heads is cut without a word, which takes a while to be noticed."""
    submits = cut_links(monkeypatch)

    async def fails(router: GeneratorService) -> None:
        with pytest.raises(Retryable, match=f"{role}-0 is lost"):
            await ask(router, request_of(PROMPT, 30))

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(fails(router))
                await submits.get()
                await submits.get()
            mesh.lose(f"{role}-0")
        async with asyncio.timeout(5.0):
            await mesh.until(lambda: len(mesh.failed) == 3)
        assert sorted(mesh.failed) == sorted(mesh.tickets)

    run(folder, model, work)


def test_a_ticket_that_no_head_has_heard_of_is_failed_when_its_client_goes_away(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the link that was cut without a word is noticed."""
    submits = cut_links(monkeypatch)

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        asking = asyncio.create_task(ask(router, request_of(PROMPT, 30)))
        await submits.get()
        await submits.get()
        asking.cancel()
        async with asyncio.timeout(5.0):
            await mesh.until(lambda: bool(mesh.failed))
        assert list(mesh.failed) == list(mesh.tickets)
        await asyncio.wait([asking])

    run(folder, model, work)


def test_a_ticket_is_left_alone_where_decode_goes_on_without_prefill(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has not said anything yet."""
    begun: asyncio.Queue[tuple[RequestRef, int]] = asyncio.Queue()
    lost: asyncio.Queue[InstanceRef] = asyncio.Queue()
    on_lost = attempt.Attempt.on_lost

    def tell(of: attempt.Attempt, instance: InstanceRef, reason: str) -> None:
        on_lost(of, instance, reason)
        lost.put_nowait(instance)

    async def work(router: GeneratorService, mesh: ToyMesh) -> None:
        begin = mesh.decode.on_first_token
        monkeypatch.setattr(mesh.decode, "on_first_token", lambda *first: begun.put_nowait(first))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask(router, request_of(PROMPT, 30)))
            first = await begun.get()
            mesh.lose("prefill-0")
            assert (await lost.get()).name == "prefill-0"
            begin(*first)
        assert task.result().token_ids == undisturbed(PROMPT, 30)
        assert value(router, metrics.MORE_ATTEMPTS) == 0
        assert mesh.failed == []

    monkeypatch.setattr(attempt.Attempt, "on_lost", tell)
    run(folder, model, work)
