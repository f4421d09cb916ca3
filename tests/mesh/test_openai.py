"""Stock OpenAI clients against the gateway in front of two prefill and two decode stages of SmolLM2."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from stagemesh.shared.model.source import open_model
from stagemesh.shared.model.tokenizer_bundle import tokenizer_bundle
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.mesh.test_aborts import steps
from tests.support.client import GENERATOR
from tests.support.mesh import wait_gone
from tests.support.running import RunningMesh, running_mesh

pytestmark = pytest.mark.slow
MODEL = "smollm2"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "Once upon a time, in a village by the sea,"
MAX_LIVE = 4
LOAD = 32  # requests
AHEAD = 4  # two steps that are under way when an abort comes, and the tokens of two that the router has not read yet
UNENDING: Any = {"ignore_eos": True}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME: Any = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 10}}, "required": ["zone"]}
SCHEMAS: Any = {"get_weather": WEATHER, "get_time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    environ = {"STAGEMESH_ROUTER__MAX_LIVE_REQUESTS": str(MAX_LIVE)}
    with running_mesh(tmp_path_factory.mktemp("openai"), "--openai-port", "0", environ=environ) as running:
        gateway = children_of(running.pids["openai"])
        assert len(gateway) == 1
        yield running
    wait_gone(gateway)


@pytest.fixture(scope="module")
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with client_of(mesh) as connected:
        yield connected


def client_of(mesh: RunningMesh, timeout_s: float = 120.0) -> openai.OpenAI:
    url = f"http://{mesh.record['openai']}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=timeout_s)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def generated(mesh: RunningMesh, **options: Any) -> list[generator_pb2.GenerateResponse]:
    """What the Generate API answers, an answer a message."""
    request = generator_pb2.GenerateRequest(whole=True, **options)

    async def ask() -> list[generator_pb2.GenerateResponse]:
        async with Client(mesh.router, GENERATOR) as direct:
            return [response async for response in direct.receive("Generate", request, timeout_s=120)]

    return sorted(asyncio.run(ask()), key=lambda response: response.index)


def chat_options() -> dict[str, Any]:
    return {"chat": generator_pb2.ChatMessages(messages=[generator_pb2.ChatMessage(**QUESTION[0])])}


def counts(usage: Any) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


def test_a_chat_has_the_tokens_of_the_generate_api_whole_and_streamed(mesh: RunningMesh, client: openai.OpenAI) -> None:
    (expected,) = generated(mesh, max_tokens=30, logprobs=2, **chat_options())
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 30, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**asked, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, "stop")
    assert counts(answer.usage) == counts(expected.finished.usage)
    check_logprobs(choice.logprobs.content, expected)

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    told = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [each.token for each in told] == tokens_of(expected.token_ids)[: len(told)]
    assert counts(chunks[-1].usage) == counts(expected.finished.usage)


def tokens_of(token_ids: Sequence[int]) -> list[str]:
    tokenizer = open_model(MODEL).tokenizer()
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]


def check_logprobs(said: Sequence[Any], expected: generator_pb2.GenerateResponse) -> None:
    """The gateway leaves out what has no text."""
    assert [each.token for each in said] == tokens_of(expected.token_ids)[: len(said)]
    assert len(said) >= len(expected.token_ids) - 1
    for each, told in zip(said, expected.logprobs, strict=False):
        assert each.logprob == pytest.approx(told.logprob, abs=1e-5)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx([top.logprob for top in told.top], abs=1e-5)


def test_a_completion_has_them_too_and_the_same_seed_draws_the_same(mesh: RunningMesh, client: openai.OpenAI) -> None:
    for temperature, seed in ((0.0, 0), (1.0, 7), (1.0, 8)):
        (expected,) = generated(mesh, text=TEXT, max_tokens=12, temperature=temperature, seed=seed)
        asked: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": 12, "temperature": temperature, "seed": seed}
        answer = client.completions.create(**asked)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "length")
        assert counts(answer.usage) == counts(expected.finished.usage)
        chunks = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text


def test_several_answers_draw_with_seeds_that_follow_each_other(mesh: RunningMesh, client: openai.OpenAI) -> None:
    expected = generated(mesh, max_tokens=8, temperature=1.0, seed=5, n=2, **chat_options())
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 1, "seed": 5, "n": 2}
    answer = client.chat.completions.create(**asked)
    said = {choice.index: choice.message.content for choice in answer.choices}
    assert said == {response.index: response.text for response in expected}
    assert said[0] != said[1]
    assert answer.usage.completion_tokens == 16
    streamed = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == said


def test_a_stop_string_ends_the_work_and_too_many_tokens_are_cut(mesh: RunningMesh, client: openai.OpenAI) -> None:
    (plain,) = generated(mesh, text=TEXT, max_tokens=12)
    stop = plain.text[len(plain.text) // 2 :][:4]  # from the middle of a word, more often than not
    # more tokens than any context has
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=10**6, temperature=0, stop=[stop])
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens < len(plain.token_ids)
    asyncio.run(mesh.check_idle())


@pytest.mark.parametrize(
    "wanted", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"]
)
def test_a_tool_that_must_be_called_is_called_with_what_it_takes(client: openai.OpenAI, wanted: Any) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": wanted, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked, max_tokens=80).choices
    assert choice.message.tool_calls, choice
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    names = {call.function.name for call in choice.message.tool_calls}
    assert names == {"get_weather"} if wanted != "required" else names <= SCHEMAS.keys()
    assert choice.finish_reason == "tool_calls"


def test_an_answer_in_a_format_is_in_it(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "temperature": 0, "response_format": form}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), CITY)


def ended(mesh: RunningMesh, outcome: str) -> dict[str, Any]:
    """What the router says of the request that has ended so."""
    line = mesh.until_said(f'"outcome":"{outcome}"')
    said: dict[str, Any] = json.loads(line.partition(" ")[2])
    return said


def test_a_client_that_goes_away_ends_the_work_within_two_steps(mesh: RunningMesh, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": 500, "temperature": 0, "extra_body": UNENDING}
    asyncio.run(mesh.check_idle())
    before, received = asyncio.run(steps(mesh, "decode-0/0")), 0
    with client.completions.create(**asked, stream=True) as stream:
        for _ in stream:
            received += 1
            if received == 6:
                break
    told = ended(mesh, "abort")
    asyncio.run(mesh.check_idle())
    made = asyncio.run(steps(mesh, "decode-0/0")) - before
    print(f"a stream: {received} tokens received, {told['completion_tokens']} when the abort came, {made + 1} in all")
    assert made + 1 <= told["completion_tokens"] + AHEAD < 250

    before = asyncio.run(steps(mesh, "decode-0/0"))
    with client_of(mesh, timeout_s=1.0) as impatient, pytest.raises(openai.APITimeoutError):
        impatient.completions.create(**asked)
    told = ended(mesh, "the client has gone")
    asyncio.run(mesh.check_idle())
    made = asyncio.run(steps(mesh, "decode-0/0")) - before
    assert made <= told["completion_tokens"] + AHEAD < 250


def test_overload_is_429_and_passes(mesh: RunningMesh, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": TEXT, "temperature": 0}
    streams = [client.completions.create(**asked, max_tokens=500, stream=True, extra_body=UNENDING) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError, match=f"{MAX_LIVE} requests are live, which is the limit"):
        client.completions.create(**asked, max_tokens=1)
    for stream in streams:
        stream.close()
    asyncio.run(mesh.check_idle())
    assert client.completions.create(**asked, max_tokens=1).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": 0}, "max_tokens: must be in 1..8"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"min_p": 1.5}}, "min_p"),
        ({"extra_body": {"regex": "([a-z"}}, "regex: Regex parsing error"),
        ({"extra_body": {"json_schema": '{"not": {}}'}}, "json_schema: at /: 'not' is not supported"),
        ({"prompt": TEXT * 2000}, "context length"),
    ],
)
def test_bad_input_is_400_and_says_what_is_wrong(client: openai.OpenAI, wrong: dict[str, Any], says: str) -> None:
    asked: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": 5, **wrong}
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(**asked)


def test_a_model_that_is_not_served_is_404(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=TEXT)


def test_nobody_can_send_the_requests_elsewhere(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(base_url=str(client.base_url).replace("/v1", "")).get("/workers", cast_to=object)


def load_generator() -> str:
    """Beside this interpreter, in an environment of its own, or on the PATH."""
    own = Path(sys.prefix) / "guidellm" / "bin" / "guidellm"
    found = str(own) if own.exists() else shutil.which("guidellm")
    assert found, "guidellm is missing: deploy/install.sh --full installs it"
    return found


@pytest.mark.full
def test_a_public_load_generator_runs_unchanged(mesh: RunningMesh, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(tokenizer_bundle(open_model(MODEL).tokenizer()))) as bundle:
        bundle.extractall(tmp_path / "tokenizer")
    options = {
        "backend": f"kind=openai_http,target=http://{mesh.record['openai']},model={MODEL}",
        "profile": f"kind=concurrent,streams={MAX_LIVE - 1}",
        "constraint": f"kind=max_requests,count={LOAD}",
        "tokenizer": f"kind=huggingface_auto,model={tmp_path / 'tokenizer'}",
        "data": "kind=synthetic_text,prompt_tokens=48,output_tokens=16",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    command = [load_generator(), "run", *(part for name, value in options.items() for part in (f"--{name}", value))]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert benchmark["scheduler_metrics"]["requests_made"]["errored"] == 0
    assert [answer["output_tokens"] for answer in benchmark["requests"]["successful"]] == [16] * LOAD
    asyncio.run(mesh.check_idle())


@pytest.mark.full
def test_gateway_and_router_come_back_where_they_were(mesh: RunningMesh, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": 3, "temperature": 0}
    expected = client.completions.create(**asked).choices[0].text
    address = mesh.record["openai"]
    os.kill(children_of(mesh.pids["openai"])[0], 9)
    asyncio.run(mesh.until_back("openai"))
    assert mesh.record["openai"] == address
    assert client.completions.create(**asked).choices[0].text == expected
    os.kill(mesh.pids["router"], 9)
    while True:  # each try ends in an error that says that there is no router, or was
        try:
            again = client.completions.create(**asked)
        except openai.InternalServerError:
            continue
        break
    assert again.choices[0].text == expected
    asyncio.run(mesh.until_back("router"))
