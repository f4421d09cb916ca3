"""Clients of one router: none takes the others' places or turns, and none touches another's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from stagemesh.services.router.generator import GeneratorService
from stagemesh.shared.config import RouterSection
from stagemesh.shared.errors import Exhausted, Rejected, StagemeshError, Unauthenticated
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.guard import Callers
from stagemesh.shared.security.keys import KeyRing, make_key
from tests.support.client import token_request
from tests.support.tiny_models import make_tiny
from tests.support.toy_mesh import ToyMesh, toy_router, undisturbed

LIMIT_S = 60.0
PROMPT = [5, 6, 7]
LOG = Log(logging.getLogger(__name__))
Contexts = dict[str, "Context"]
Work = Callable[[GeneratorService, ToyMesh, Contexts], Awaitable[None]]


class Context:
    """A call of a client."""

    def __init__(self, key: str) -> None:
        self._key = key

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._key}"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=1, max_context=1 << 16)


def run(tmp_path_factory: pytest.TempPathFactory, model: Path, work: Work, max_live: int = 4096) -> None:
    folder = tmp_path_factory.mktemp("s")
    keys = {name: make_key(name) for name in ("alice", "bob")}
    path = folder / "keys"
    path.write_text("".join(f"{line}\n" for _, line in keys.values()))
    path.chmod(0o600)
    contexts = {name: Context(key) for name, (key, _) in keys.items()}

    async def go() -> None:
        mesh, section = ToyMesh(), RouterSection(max_waiting_requests=8, max_live_requests=max_live)
        callers = Callers(KeyRing(path, LOG), LOG)
        routers = toy_router(folder, model, mesh, section, callers=callers, max_ahead=2)
        async with asyncio.timeout(LIMIT_S), routers as router:
            await work(router, mesh, contexts)
            assert router.num_live == router.num_waiting == 0
            router.check_integrity()
            await mesh.settled()

    asyncio.run(go())


async def ask(router: GeneratorService, context: Context, request_id: str) -> list[int] | Exhausted:
    tokens: list[int] = []
    request = token_request(PROMPT, 4, request_id=request_id, seed=0)
    try:
        async for response in router.Generate(request, context):
            router.check_integrity()
            tokens += response.token_ids
    except Exhausted as error:
        return error
    return tokens


def test_a_flood_of_one_key_leaves_another_its_share_of_places_and_turns(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh, contexts: Contexts) -> None:
        mesh.prefill.paused = True
        async with asyncio.TaskGroup() as group:

            def send(name: str, count: int, start: int = 0) -> list[asyncio.Task[list[int] | Exhausted]]:
                numbers = range(start, start + count)
                return [group.create_task(ask(router, contexts[name], f"{name}-{n}")) for n in numbers]

            flood = send("alice", 8)
            await mesh.until(lambda: len(mesh.prefill.submits) == 2)
            assert isinstance(await ask(router, contexts["alice"], "alice-more"), Exhausted)
            assert not any(task.done() for task in flood)
            mine = send("bob", 4)
            crowded_out = [await task for task in reversed(flood[4:])]
            assert all(isinstance(each, Exhausted) for each in crowded_out)
            assert "makes room for another client" in str(crowded_out[0])
            assert isinstance(await ask(router, contexts["bob"], "bob-more"), Exhausted)  # he has his half
            waiting = [s.value for s in router.records.measure() if s.labels == ("turn",)]
            assert waiting == [6]
            mesh.prefill.resume()
        right = undisturbed(PROMPT, 4)
        assert [task.result() for task in (*flood[:4], *mine)] == [right] * 8
        order = [submit.request.request_id.partition("-")[0] for submit in mesh.prefill.submits]
        assert order[:2] == ["alice", "alice"]
        assert sorted(order[2:6]) == ["alice", "alice", "bob", "bob"]
        counted = {s.labels: s.value for s in router.records.measure() if s.metric is metrics.CLIENT_REQUESTS}
        assert counted[("alice", "length")] == counted[("bob", "length")] == 4
        assert counted[("alice", "exhausted")] == 5

    run(tmp_path_factory, model, work)


WRONG = [
    token_request(PROMPT, 4, temperature=-1.0),
    token_request(PROMPT, 0),
    token_request(PROMPT, 4, min_tokens=5),
    token_request(PROMPT, 4, priority=101),
    token_request(PROMPT, 4, n=2, request_id="r/1"),
    token_request([999_999], 4),
    token_request(PROMPT, 4, request_id="alice-0"),
    token_request(PROMPT, 4, request_id="alice-0", n=2),
    generator_pb2.GenerateRequest(text="x", max_tokens=0),
    generator_pb2.GenerateRequest(text="x", top_p=2.0, n=2),
]
TOO_MANY = [token_request(PROMPT, 4, n=count) for count in (5, 8, 9)]


@pytest.mark.parametrize(
    ("request_", "why"), [(each, Rejected) for each in WRONG] + [(each, Exhausted) for each in TOO_MANY]
)
def test_nobody_loses_a_place_to_what_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    request_: generator_pb2.GenerateRequest,
    why: type[StagemeshError],
) -> None:
    """Of alice's eight, which take all places, four would make room for bob's."""

    async def work(router: GeneratorService, mesh: ToyMesh, contexts: Contexts) -> None:
        mesh.prefill.paused = True
        async with asyncio.TaskGroup() as group:
            flood = [group.create_task(ask(router, contexts["alice"], f"alice-{n}")) for n in range(8)]
            await mesh.until(lambda: len(mesh.prefill.submits) == 2)
            with pytest.raises((why, ExceptionGroup)) as caught:
                async for _ in router.Generate(request_, contexts["bob"]):
                    pass
            error = caught.value  # of several answers: in a group
            assert isinstance(error.exceptions[0] if isinstance(error, ExceptionGroup) else error, why)
            router.check_integrity()
            mesh.prefill.resume()
        assert [task.result() for task in flood] == [undisturbed(PROMPT, 4)] * 8

    run(tmp_path_factory, model, work)


def test_as_many_make_room_as_answers_are_asked_for(tmp_path_factory: pytest.TempPathFactory, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh, contexts: Contexts) -> None:
        mesh.prefill.paused = True
        async with asyncio.TaskGroup() as group:
            flood = [group.create_task(ask(router, contexts["alice"], f"alice-{n}")) for n in range(7)]
            await mesh.until(lambda: len(mesh.prefill.submits) == 2)
            bob = router.Generate(token_request(PROMPT, 4, n=3, seed=0), contexts["bob"])
            first = group.create_task(anext(bob))
            lost = [await task for task in flood[5:]]
            assert all(isinstance(each, Exhausted) for each in lost)
            router.check_integrity()
            mesh.prefill.resume()
            got = [await first] + [response async for response in bob]
        assert sum(response.HasField("finished") for response in got) == 3
        assert [task.result() for task in flood[:5]] == [undisturbed(PROMPT, 4)] * 5

    run(tmp_path_factory, model, work)


def test_a_request_is_aborted_by_its_own_client_alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh, contexts: Contexts) -> None:
        mesh.prefill.paused = True
        task = asyncio.create_task(ask(router, contexts["alice"], "hers"))
        await mesh.until(lambda: len(mesh.prefill.submits) == 1)
        request = generator_pb2.AbortRequest(request_id="hers")
        assert not (await router.Abort(request, contexts["bob"])).was_live
        assert (await router.Abort(request, contexts["alice"])).was_live
        assert await task == []
        with pytest.raises(Unauthenticated):
            await router.Abort(request, Context("alice.guess"))

    run(tmp_path_factory, model, work)


def test_answers_that_nobody_reads_take_half_of_the_room_at_most(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> None:
    async def work(router: GeneratorService, mesh: ToyMesh, contexts: Contexts) -> None:
        def open_stream(name: str, number: int) -> AsyncGenerator[generator_pb2.GenerateResponse, None]:
            request = token_request(PROMPT, 400, request_id=f"{name}-{number}")
            return router.Generate(request, contexts[name])

        unread = [open_stream("alice", number) for number in range(3)]
        for stream in unread:
            await anext(stream)
        with pytest.raises(Exhausted, match="3 requests of this client are live, and 3 may be"):
            await anext(open_stream("alice", 3))
        assert await ask(router, contexts["bob"], "bob-0") == undisturbed(PROMPT, 4)
        for stream in unread:
            await stream.aclose()

    run(tmp_path_factory, model, work, max_live=6)
