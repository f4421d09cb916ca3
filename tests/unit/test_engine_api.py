"""The engine proto over gRPC, in front of a whole router and toy heads."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from tokenizers import Tokenizer as Backend

from stagemesh.services.router.engine_api import EngineService
from stagemesh.services.router.generator import GeneratorService
from stagemesh.shared.core.directory import Role
from stagemesh.shared.errors import Exhausted, Rejected, Unsupported
from stagemesh.shared.model.source import open_model
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.engine_proto import engine_proto
from stagemesh.shared.rpc.server import Server
from tests.support.toy_mesh import ToyMesh, undisturbed
from tests.unit.test_router_generate import PROMPT, folder, model, run

__all__ = ["folder", "model"]  # fixtures
Work = Callable[[Client, GeneratorService, ToyMesh], Awaitable[None]]


def asked(max_tokens: int, *, stream: bool = True, request_id: str = "r", **sampling: Any) -> Any:
    request = vllm_engine_pb2.GenerateRequest(request_id=request_id, stream=stream)
    request.tokenized.input_ids.extend(PROMPT)
    request.sampling_params.CopyFrom(vllm_engine_pb2.SamplingParams(max_tokens=max_tokens, seed=0, **sampling))
    return request


def serve(folder: Path, model: Path, work: Work, **section: Any) -> None:
    proto = engine_proto()
    assert proto is not None

    async def go(router: GeneratorService, mesh: ToyMesh) -> None:
        service = EngineService(proto, router, open_model(str(model)).tokenizer(), "toy")
        server = Server({proto.service: service})
        await server.start(f"unix:{folder}/engine")
        try:
            async with Client(f"unix:{folder}/engine", proto.service) as client:
                await work(client, router, mesh)
        finally:
            await server.stop()

    run(folder, model, go, **section)


async def tokens_of(client: Client, request: Any) -> tuple[dict[int, list[int]], list[Any]]:
    """By index, and what ended each."""
    tokens: dict[int, list[int]] = {}
    ends = []
    async for message in client.receive("Generate", request, timeout_s=30):
        if message.HasField("chunk"):
            tokens.setdefault(message.chunk.index, []).extend(message.chunk.token_ids)
        else:
            tokens.setdefault(message.complete.index, []).extend(message.complete.output_ids)
            ends.append(message.complete)
    return tokens, ends


@pytest.mark.parametrize("stream", [True, False])
def test_answers_have_the_tokens_of_the_generate_api(folder: Path, model: Path, stream: bool) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        tokens, ends = await tokens_of(client, asked(20, stream=stream, n=2))
        assert tokens == {0: undisturbed(PROMPT, 20, 0), 1: undisturbed(PROMPT, 20, 1)}
        assert [(end.finish_reason, end.completion_tokens) for end in ends] == [("length", 20)] * 2

    serve(folder, model, work)


def test_an_abort_may_name_several_and_what_is_not_there_and_come_twice(folder: Path, model: Path) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        abort = vllm_engine_pb2.AbortRequest(request_ids=["r", "no such"])
        ends = []
        async for message in client.receive("Generate", asked(50_000), timeout_s=30):
            if message.HasField("complete"):
                ends.append(message.complete.finish_reason)
            else:
                await client.call("Abort", abort, timeout_s=10)
        assert ends == ["abort"]
        await client.call("Abort", abort, timeout_s=10)

    serve(folder, model, work)


def test_an_abort_names_no_more_than_may_be_live(folder: Path, model: Path) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        with pytest.raises(Rejected, match=r"^request_ids: must be at most 4, .*, got 5$"):
            await client.call("Abort", vllm_engine_pb2.AbortRequest(request_ids=["r"] * 5), timeout_s=10)
        await client.call("Abort", vllm_engine_pb2.AbortRequest(request_ids=["r"] * 4), timeout_s=10)

    serve(folder, model, work, max_live_requests=4)


def test_a_gateway_that_goes_away_ends_the_request(folder: Path, model: Path) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        async with aclosing(client.receive("Generate", asked(50_000), timeout_s=30)) as messages:
            await anext(messages)
            assert router.num_live == 1
        await router.empty()

    serve(folder, model, work)


def test_errors_come_before_the_first_message_with_their_status(folder: Path, model: Path) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        for wrong in ({"temperature": -1.0}, {"structural_tag": "{}"}, {"json_schema": "["}):
            with pytest.raises(Rejected):
                await tokens_of(client, asked(5, **wrong))
        async with aclosing(client.receive("Generate", asked(50_000), timeout_s=30)) as messages:
            await anext(messages)
            with pytest.raises(Exhausted):
                await tokens_of(client, asked(5, request_id="s"))
        await router.empty()

    serve(folder, model, work, max_live_requests=1)


def test_what_it_says_of_itself(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        async def call(name: str) -> Any:
            return await client.call(name, getattr(vllm_engine_pb2, f"{name}Request")(), timeout_s=10)

        info = await call("GetModelInfo")
        assert (info.served_model_name, info.max_context_length) == ("toy", router.limits().max_request_tokens)
        assert (await call("HealthCheck")).healthy
        async with aclosing(client.receive("Generate", asked(50_000), timeout_s=30)) as messages:
            await anext(messages)
            assert (await call("GetServerInfo")).active_requests == 1
            assert (await call("GetLoads")).loads[0].num_running_reqs == 1
        await router.empty()
        there = list(mesh.infos)
        with monkeypatch.context() as patch:
            patch.setattr(router, "_mesh", [info for info in there if info.role is Role.PREFILL])
            health = await call("HealthCheck")
        assert (health.healthy, health.message) == (False, "no decode instance is there to take requests")
        router.refuse()
        assert (await call("HealthCheck")).message == "this router is being stopped"
        with pytest.raises(Unsupported, match="Method not found"):
            await call("Embed")

    serve(folder, model, work)


def test_the_tokenizer_is_given_away_whole(folder: Path, model: Path) -> None:
    async def work(client: Client, router: GeneratorService, mesh: ToyMesh) -> None:
        for _ in range(2):
            parts = [p async for p in client.receive("GetTokenizer", common_pb2.GetTokenizerRequest(), timeout_s=30)]
            bundle = b"".join(part.data for part in parts)
            assert parts[-1].sha256 == hashlib.sha256(bundle).hexdigest()
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            backend = Backend.from_str(files.read("tokenizer.json").decode())
            assert {"tokenizer.json", "tokenizer_config.json"} <= set(files.namelist())
        assert backend.encode("hello there").ids == open_model(str(model)).tokenizer().encode("hello there")

    serve(folder, model, work)
