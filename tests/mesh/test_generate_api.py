"""The Generate API of a running mesh: what a client may ask for, and what it gets for nonsense."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from stagemesh.shared.errors import Exhausted, Rejected, StagemeshError
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import CHUNK, PAGE, load_reference
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
Request = generator_pb2.GenerateRequest
PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_context=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@pytest.fixture(scope="module")
def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "400", "--max-running", "16"]
    options = ["--model", str(model), "--dtype", "float64", *sizes]
    with running_mesh(tmp_path_factory.mktemp("api"), *options) as running:
        yield running
        asyncio.run(running.check_idle())


def ask(mesh: RunningMesh, *requests: Request) -> list[Answer]:
    async def all_at_once() -> list[Answer]:
        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(generate(client, request)) for request in requests]
        return [task.result() for task in tasks]

    return asyncio.run(all_at_once())


def test_a_token_depends_on_seed_and_position_only(mesh: RunningMesh) -> None:
    def request(seed: int) -> Request:
        return token_request(PROMPT, 20, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=seed, ignore_eos=True)

    alone = ask(mesh, request(7))[0]
    crowd = [token_request(range(5, 5 + n), 20, temperature=1.5, seed=n, ignore_eos=True) for n in range(1, 12)]
    among = ask(mesh, *crowd[:6], request(7), *crowd[6:])[6]
    assert among.token_ids == alone.token_ids
    assert ask(mesh, request(8))[0].token_ids != alone.token_ids


def test_log_probabilities_are_the_references(mesh: RunningMesh, reference: Any) -> None:
    async def collect() -> tuple[list[int], list[generator_pb2.Logprobs]]:
        ids, told = list[int](), list[generator_pb2.Logprobs]()
        async with Client(mesh.router, GENERATOR) as client:
            request = token_request(PROMPT, 12, temperature=1.0, seed=3, logprobs=3, ignore_eos=True)
            async for response in client.receive("Generate", request, timeout_s=60):
                ids += response.token_ids
                told += response.logprobs
        return ids, told

    ids, told = asyncio.run(collect())
    with torch.inference_mode():
        exact = reference(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert len(told) == len(ids) == 12
    for at, said in enumerate(told):
        assert said.logprob == pytest.approx(float(exact[at, ids[at]]), abs=1e-6)
        best = exact[at].topk(3)
        assert [top.token_id for top in said.top] == best.indices.tolist()
        assert [top.logprob for top in said.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_min_tokens_puts_off_every_stop_rule(mesh: RunningMesh) -> None:
    plain = ask(mesh, token_request(PROMPT, 24, ignore_eos=True))[0].token_ids
    third = plain[2]
    stopped, held = ask(
        mesh,
        token_request(PROMPT, 24, ignore_eos=True, stop_token_ids=[third]),
        token_request(PROMPT, 24, ignore_eos=True, stop_token_ids=[third], min_tokens=10),
    )
    assert stopped.token_ids == plain[: plain.index(third) + 1]
    assert stopped.reason == "stop"
    assert third not in held.token_ids[:10]
    assert len(held.token_ids) > 10


def test_a_stop_string_ends_the_request_and_never_shows(mesh: RunningMesh) -> None:
    plain = ask(mesh, token_request(PROMPT, 40, ignore_eos=True))[0]
    middle = len(plain.text) // 2
    stop = plain.text[middle : middle + 5]
    others = [f"never{n}" for n in range(63)]
    without, with_it = ask(
        mesh,
        token_request(PROMPT, 40, ignore_eos=True, stop=[*others, stop]),
        token_request(PROMPT, 40, ignore_eos=True, stop=[stop], include_stop=True),
    )
    before = plain.text[: plain.text.index(stop)]
    assert (without.text, with_it.text) == (before, before + stop)
    for answer in (without, with_it):
        assert answer.reason == "stop"
        assert answer.finished is not None
        assert answer.finished.stop == stop
        assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
        assert len(answer.token_ids) == answer.finished.usage.completion_tokens < 40


def test_a_whole_answer_comes_in_one_response_and_equals_the_stream(mesh: RunningMesh) -> None:
    async def count() -> tuple[int, Answer]:
        responses = 0

        def took(_: Answer) -> bool:
            nonlocal responses
            responses += 1
            return True

        async with Client(mesh.router, GENERATOR) as client:
            request = token_request(PROMPT, 20, ignore_eos=True, whole=True)
            answer = await generate(client, request, on_response=took)
        return responses, answer

    responses, whole = asyncio.run(count())
    streamed = ask(mesh, token_request(PROMPT, 20, ignore_eos=True))[0]
    assert responses == 1
    assert (whole.token_ids, whole.text) == (streamed.token_ids, streamed.text)


def with_prompt(**options: Any) -> Request:
    return token_request(PROMPT, options.pop("max_tokens", 4), **options)


def chat(*messages: tuple[str, str]) -> Request:
    request = Request()
    request.chat.SetInParent()
    for role, content in messages:
        request.chat.messages.add(role=role, content=content)
    return request


WRONG: list[tuple[Request, str]] = [
    (Request(), "prompt"),
    (Request(text=""), "text"),
    (Request(text="x" * 10_000_000), "text: must be 1..1048576 bytes"),
    (token_request([], 4), "token_ids: must not be empty"),
    (token_request([320], 4), "token_ids: must be in 0..319"),
    (token_request([5, -1], 4), "token_ids: must be in 0..319, got -1 at index 1"),
    (token_request([5] * 256, 1), "prompt: must be 1..255 tokens"),
    (with_prompt(max_tokens=0), "max_tokens: must be in 1..216"),
    (with_prompt(max_tokens=217), "max_tokens: must be in 1..216"),
    (with_prompt(max_tokens=-5), "max_tokens"),
    (with_prompt(temperature=math.nan), "temperature: must be in 0.0..100.0, got nan"),
    (with_prompt(temperature=-0.1), "temperature"),
    (with_prompt(temperature=math.inf), "temperature"),
    (with_prompt(top_k=-1), "top_k: must be in 0..320"),
    (with_prompt(top_p=0.0), "top_p"),
    (with_prompt(top_p=math.nan), "top_p"),
    (with_prompt(min_p=1.5), "min_p: must be in 0.0..1.0"),
    (with_prompt(min_tokens=5), "min_tokens: must be in 0..4"),
    (with_prompt(logprobs=21), "logprobs: must be in 0..20"),
    (with_prompt(stop=["x"] * 65), "stop: must be at most 64 strings"),
    (with_prompt(stop=[""]), "stop: must be 1..256 bytes"),
    (with_prompt(stop=["x" * 257]), "stop: must be 1..256 bytes"),
    (with_prompt(stop_token_ids=[999]), "stop_token_ids: must be in 0..319"),
    (with_prompt(stop_token_ids=list(range(65))), "stop_token_ids: must be at most 64"),
    (with_prompt(request_id="a b"), "request_id: must be 1..128 characters"),
    (chat(), "chat.messages"),
    (chat(("", "hello")), "chat.messages: message 0 has no role"),
    (chat(("alien", "hello")), "messages"),
]


@pytest.mark.parametrize(("request_", "message"), WRONG, ids=[f"{i}-{m[:24]}" for i, (_, m) in enumerate(WRONG)])
def test_a_wrong_field_is_named_with_its_limit(mesh: RunningMesh, request_: Request, message: str) -> None:
    with pytest.raises(Rejected) as raised:
        asyncio.run(one(mesh, request_))
    assert message in str(raised.value)


async def one(mesh: RunningMesh, request: Request) -> Answer:
    async with Client(mesh.router, GENERATOR) as client:
        return await generate(client, request, timeout_s=30)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(mesh: RunningMesh) -> None:
    async def twice() -> None:
        async with Client(mesh.router, GENERATOR) as client:
            request = token_request(PROMPT, 100, ignore_eos=True, request_id="mine")
            started = asyncio.Event()

            def took(_: Answer) -> bool:
                started.set()
                return True

            first = asyncio.create_task(generate(client, request, on_response=took))
            await started.wait()
            with pytest.raises(Rejected, match="request_id: 'mine' is in use"):
                await generate(client, request)
            assert len((await first).token_ids) == 100
            assert len((await generate(client, request)).token_ids) == 100

    asyncio.run(twice())


def test_a_message_over_the_grpc_limit_is_told_so(mesh: RunningMesh) -> None:
    with pytest.raises(Exhausted, match=str(16 << 20)):
        asyncio.run(one(mesh, Request(text="x" * (17 << 20))))


def malformed(rng: random.Random) -> Request:
    """A request that has at least one wrong field."""
    wrong, _ = rng.choice([pair for pair in WRONG if len(pair[0].text) < 1000])
    request = Request()
    request.CopyFrom(wrong)
    for field, value in (("temperature", -1.0), ("top_k", -7), ("min_p", math.nan), ("logprobs", 99)):
        if rng.random() < 0.3:
            setattr(request, field, value)
    return request


def storm_of_nonsense(mesh: RunningMesh, count: int) -> None:
    slowest_s = 0.0

    async def run() -> tuple[list[StagemeshError], list[Answer]]:
        rng = random.Random(5)
        errors: list[StagemeshError] = []
        places = asyncio.Semaphore(16)  # what is measured is the answer's time, not this client's queue

        async def wrong(client: Client) -> None:
            nonlocal slowest_s
            async with places:
                start_s = time.monotonic()
                try:
                    await generate(client, malformed(rng), timeout_s=60)
                except StagemeshError as error:
                    errors.append(error)
                slowest_s = max(slowest_s, time.monotonic() - start_s)

        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            good = [group.create_task(generate(client, token_request(PROMPT, 60, ignore_eos=True))) for _ in range(4)]
            for _ in range(count):
                group.create_task(wrong(client))
        return errors, [task.result() for task in good]

    undisturbed = ask(mesh, token_request(PROMPT, 60, ignore_eos=True))[0]
    errors, answers = asyncio.run(run())
    assert len(errors) == count
    assert {type(error) for error in errors} == {Rejected}
    print(f"{count} malformed requests: each refused with its field, the slowest after {slowest_s:.3f} s")
    assert all(answer.token_ids == undisturbed.token_ids for answer in answers)


def test_nonsense_gets_typed_errors_and_disturbs_nobody(mesh: RunningMesh) -> None:
    storm_of_nonsense(mesh, 200)


@pytest.mark.full
def test_a_thousand_malformed_requests(mesh: RunningMesh) -> None:
    storm_of_nonsense(mesh, 1000)


def test_bytes_that_are_no_request_are_the_clients_mistake(mesh: RunningMesh) -> None:
    async def send() -> None:
        async with grpc.aio.insecure_channel(mesh.router) as channel:
            call = channel.unary_stream("/stagemesh.v1.Generator/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await anext(aiter(call(b"\x12\x03\xff\xfe\xfd")))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "message: is no GenerateRequest" in (raised.value.details() or "")

    asyncio.run(send())


def test_an_id_can_be_used_again_the_moment_its_request_has_ended(mesh: RunningMesh) -> None:
    """The heads may still be winding the aborted one up."""

    async def aborted(client: Client, request: Request) -> str:
        aborts: list[asyncio.Task[Any]] = []

        def took(_: Answer) -> bool:
            if not aborts:
                abort = generator_pb2.AbortRequest(request_id=request.request_id)
                aborts.append(group.create_task(client.call("Abort", abort, timeout_s=30)))
            return True

        async with asyncio.TaskGroup() as group:
            return (await generate(client, request, on_response=took)).reason

    async def again_and_again() -> None:
        async with Client(mesh.router, GENERATOR) as client:
            request = token_request(PROMPT, 60, ignore_eos=True, request_id="again")
            assert {await aborted(client, request) for _ in range(20)} == {"abort"}
            assert len((await generate(client, request)).token_ids) == 60

    asyncio.run(again_and_again())
