"""Answers that match what they were to, on a mesh, also when the instance that makes them is lost half way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.bench.structured import run
from tests.mesh.test_exact_tiny import CHUNK, PAGE
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh, running_mesh
from tests.support.schemas import SCHEMAS
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
Request = generator_pb2.GenerateRequest
ROOM = 100
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.3}


def requests() -> list[Request]:
    """By schema, by regex, by grammar, and with penalties alone; random, so that a token too many or too few shows."""
    asks = [{"json_schema": json.dumps(schema)} for schema in SCHEMAS[::3]]
    asks += [{"regex": "[a-z ]{40,60}"}, {"ebnf": 'root ::= ("ab" | "cd")+ "." [0-9] [0-9]'}]
    asks = [{**PENALTIES, **each} for each in asks] + [{"ignore_eos": True, **PENALTIES} for _ in range(3)]
    return [token_request(range(5, 25 + n), ROOM, temperature=1.0, seed=n, **ask) for n, ask in enumerate(asks)]


async def ask_all(
    mesh: RunningMesh, wanted: Sequence[Request], on_response: Callable[[Answer], bool] | None = None
) -> list[Answer]:
    async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(client, each, on_response=on_response)) for each in wanted]
    return [task.result() for task in tasks]


def check(wanted: Sequence[Request], answers: Sequence[Answer]) -> None:
    """Whatever has ended by itself matches."""
    ended = 0
    for request, answer in zip(wanted, answers, strict=True):
        match request.WhichOneof("structure"):
            case None:
                assert (answer.reason, len(answer.token_ids)) == ("length", ROOM)
                continue
            case _ if answer.reason == "length":
                continue
            case "json_schema":
                jsonschema.validate(json.loads(answer.text), json.loads(request.json_schema))
            case "regex":
                assert re.fullmatch(request.regex, answer.text)
            case "ebnf":
                assert re.fullmatch(r"(ab|cd)+\.[0-9]{2}", answer.text)
        assert answer.reason == "stop"
        ended += 1
    assert ended > 5


def test_answers_match_and_are_the_same_when_their_instance_is_lost(tmp_path: Path) -> None:
    model, wanted = make_tiny(tmp_path / "model", max_context=256), requests()

    async def work(mesh: RunningMesh) -> None:
        expected = await ask_all(mesh, wanted)
        check(wanted, expected)
        struck = False

        def strike(so_far: Answer) -> bool:
            nonlocal struck
            if not struck and len(so_far.token_ids) > 12:
                struck = True
                os.kill(mesh.pids["decode-0/1"], signal.SIGKILL)
            return True

        answers = await ask_all(mesh, wanted, strike)
        assert struck
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        async with Client(mesh.router, GENERATOR) as client:
            with pytest.raises(Rejected, match=r"regex: Regex parsing error.*Unclosed"):
                await generate(client, token_request([5], 9, regex="([a-z"))
            with pytest.raises(Rejected, match="json_schema: at /items: 'not' is not supported"):
                await generate(client, token_request([5], 9, json_schema='{"items": {"not": {}}}'))
        await mesh.until_back("decode-0")
        await mesh.until_instances(3)
        await mesh.check_idle()

    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "400", "--max-running", "16"]
    options = ["--model", str(model), "--dtype", "float64", *sizes, "--decode-instances", "2"]
    with running_mesh(tmp_path, *options, environ={"STAGEMESH_ENGINE__DRAIN_TIMEOUT_S": "5"}) as mesh:
        asyncio.run(mesh.until_instances(3))
        asyncio.run(work(mesh))


@pytest.mark.full
def test_five_hundred_answers_over_twenty_schemas_are_valid(tmp_path: Path) -> None:
    outcome = run(tmp_path, "smollm2", 500, 32, 2)
    assert (outcome.valid, outcome.answers) == (500, 500)
