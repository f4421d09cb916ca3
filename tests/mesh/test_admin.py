"""Every command of operators on a running mesh, with the plain client library of NATS: what it does, and its errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from nats.errors import NoRespondersError

from stagemesh.shared.admin.commands import COMMANDS
from stagemesh.shared.rpc.client import Client
from tests.support.admin import CommandError, Operator, operator
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.mesh import ROOT
from tests.support.running import RunningMesh, running_mesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
PROMPT = [(7 * n) % 300 + 4 for n in range(100)]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=4, max_context=4096)
    sizes = ["--page-size", "8", "--chunk-size", "32", "--num-pages", "600", "--max-running", "8"]
    with running_mesh(tmp_path_factory.mktemp("admin"), "--model", str(path), *sizes) as running:
        yield running


def with_operator(mesh: RunningMesh, work: Callable[[Operator], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S), operator(str(mesh.record["nats"])) as found:
            await work(found)

    asyncio.run(limited())


async def ask_on(client: Client, answers: asyncio.Queue[Answer]) -> None:
    while True:
        answers.put_nowait(await generate(client, token_request(PROMPT, 5, ignore_eos=True)))


async def state_of(by: Operator, instance: str) -> str:
    listed = await by.call("instance.list")
    return next(str(each["state"]) for each in listed["instances"] if each["name"] == instance)


def test_any_client_lists_the_commands_with_help_and_schemas(mesh: RunningMesh) -> None:
    async def work(by: Operator) -> None:
        assert (await by.discover("PING"))["name"] == "stagemesh"
        info, stats = await by.discover("INFO"), await by.discover("STATS")
        endpoints = {each["subject"].removeprefix("stagemesh.local.admin."): each for each in info["endpoints"]}
        assert endpoints.keys() == COMMANDS.keys()
        assert all(each["metadata"]["help"] == COMMANDS[name].help for name, each in endpoints.items())
        schema = json.loads(endpoints["instance.set"]["metadata"]["request"])
        assert schema["required"] == ["instance", "setting", "value"]
        assert {each["subject"] for each in stats["endpoints"]} == {each["subject"] for each in info["endpoints"]}

    with_operator(mesh, work)


def test_the_mesh_and_its_instances_are_told(mesh: RunningMesh) -> None:
    async def work(by: Operator) -> None:
        status = await by.call("mesh.status")
        assert (status["mesh"], status["instances"]) == ("local", {"prefill": 1, "decode": 1})
        assert status["states"] == {"serving": 2}
        assert status["nats"]["connected"]
        assert len(status["routers"]) == 1
        listed = {each["name"]: each for each in (await by.call("instance.list"))["instances"]}
        decode = listed["decode-0"]
        assert (decode["role"], decode["state"], decode["pages"]) == ("decode", "serving", 600)
        assert [stage["layers"] for stage in decode["stages"]] == [[0, 2], [2, 4]]
        assert listed.keys() == {"prefill-0", "decode-0"}

    with_operator(mesh, work)


def test_a_drained_instance_gets_nothing_new_finishes_what_it_has_and_serves_again(mesh: RunningMesh) -> None:
    async def work(by: Operator) -> None:
        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            running = group.create_task(generate(client, token_request(PROMPT, 600, ignore_eos=True)))
            while not (await by.call("mesh.status"))["running"]:
                assert not running.done()
            drained = await by.call("instance.drain", instance="decode-0", wait_s=0)
            assert (drained["state"], drained["held"]["sequences"]) == ("draining", 1)
            assert len((await running).token_ids) == 600
            while await state_of(by, "decode-0") != "drained":
                pass  # each round asks the broker, which takes its time
            answers = asyncio.Queue[Answer]()
            asking = group.create_task(ask_on(client, answers))
            with suppress(TimeoutError):  # once the router has heard that there is nobody to answer
                while True:
                    await asyncio.wait_for(answers.get(), 2.0)
            assert (await by.call("instance.drain", instance="decode-0")) == {
                "instance": "decode-0",
                "state": "drained",
                "held": {},
            }
            assert answers.empty()
            assert (await by.call("instance.resume", instance="decode-0"))["state"] == "serving"
            assert len((await answers.get()).token_ids) == 5
            asking.cancel()
        events = (await by.call("events", limit=1000))["events"]
        kinds = [event["event"] for event in events if event["name"] == "decode-0"]
        assert [kind for kind in kinds if kind != "joined"][:3] == ["draining", "drained", "resumed"]

    with_operator(mesh, work)


@pytest.mark.parametrize(
    ("instance", "setting", "value", "previous"),
    [
        ("decode-0", "schedule_conservativeness", 0.5, 1),
        ("decode-0", "max_running", 4, 8),
        ("decode-0", "extra_depth", 1, 0),
        ("prefill-0", "log_level", "debug", "info"),
    ],
)
def test_settings_change_and_change_back(
    mesh: RunningMesh, instance: str, setting: str, value: float | str, previous: float | str
) -> None:
    async def work(by: Operator) -> None:
        for new, old in ((value, previous), (previous, value)):
            said = await by.call("instance.set", instance=instance, setting=setting, value=new)
            assert (said["previous"], said["value"]) == (old, new)
            async with Client(mesh.router, GENERATOR) as client:
                assert len((await generate(client, token_request(PROMPT, 9, ignore_eos=True))).token_ids) == 9

    with_operator(mesh, work)


def test_a_request_is_seen_and_ended(mesh: RunningMesh) -> None:
    async def work(by: Operator) -> None:
        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            request = token_request(PROMPT, 3_000, ignore_eos=True)
            request.request_id = "to-be-ended"
            running = group.create_task(generate(client, request))
            listed: list[dict[str, Any]] = []
            while not listed or listed[0]["state"] in ("", "tokenizing"):
                listed = (await by.call("request.list"))["requests"]
            assert listed[0]["request_id"].startswith("to-be-ended")
            assert listed[0]["details"]["prompt_tokens"] == len(PROMPT)
            while not (await by.call("request.abort", request_id="to-be-ended"))["was_live"]:
                pass
            answer = await running
            assert answer.finished is not None
            assert len(answer.token_ids) < 3_000
        assert await by.call("request.abort", request_id="to-be-ended") == {
            "request_id": "to-be-ended",
            "was_live": False,
        }
        assert (await by.call("request.list")) == {"total": 0, "requests": [], "silent": []}

    with_operator(mesh, work)
    asyncio.run(mesh.check_idle())


def test_the_cache_is_flushed_and_the_config_told(mesh: RunningMesh) -> None:
    async def work(by: Operator) -> None:
        async with Client(mesh.router, GENERATOR) as client:
            await generate(client, token_request(PROMPT, 5, ignore_eos=True))
        await mesh.check_idle()
        assert (await by.call("cache.flush"))["pages"]["prefill-0"] >= len(PROMPT) // 8
        assert (await by.call("cache.flush", instance="prefill-0")) == {"pages": {"prefill-0": 0}}
        config = (await by.call("config.get"))["config"]
        assert config["engine"]["num_pages"] == 600
        assert [each["name"] for each in config["instances"]] == ["prefill-0", "decode-0"]
        assert (await by.call("config.get", section="nats"))["config"]["nats"]["url"] == mesh.record["nats"]

    with_operator(mesh, work)


@pytest.mark.parametrize(
    ("command", "payload", "code", "text"),
    [
        ("instance.drain", b"{}", "400", "instance: is missing"),
        ("instance.drain", b'{"instance": "decode-7"}', "400", "no instance is named 'decode-7'; there are decode-0, "),
        ("instance.resume", b'{"instance": 7}', "400", "instance: expected str, got int"),
        ("instance.set", b'{"instance": "decode-0", "setting": "pages", "value": 1}', "400", "setting: invalid enum"),
        ("instance.set", b'{"instance":"decode-0","setting":"max_running","value":9}', "400", "max_running: must be"),
        ("instance.set", b'{"instance":"prefill-0","setting":"max_running","value":9}', "400", "setting: prefill"),
        ("instance.set", b'{"instance":"decode-0","setting":"log_level","value":"x"}', "400", "log_level: must be one"),
        ("instance.set", b'{"instance":"decode-0","setting":"log_level","value":1}', "400", "value: of log_level"),
        ("request.list", b'{"limit": 1001}', "400", "limit: expected int <= 1000"),
        ("request.abort", b'{"request_id": ""}', "400", "request_id: expected str of length >= 1"),
        ("cache.flush", b'{"instance": "decode-0"}', "400", "instance: decode instances cache no prompts"),
        ("config.get", b'{"section": "secrets"}', "400", "section: must be one of mesh, nats, "),
        ("events", b"[]", "400", "request: expected object, got array"),
        ("mesh.status", b"{", "400", "request: must be a JSON object"),
        ("mesh.status", b'{"verbose": true}', "400", "verbose: is no field of this command; there are none"),
        ("mesh.status", b" " * 70_000, "400", "request: must have at most 65536 bytes, has 70000"),
    ],
)
def test_errors_name_the_field_and_the_limit(
    mesh: RunningMesh, command: str, payload: bytes, code: str, text: str
) -> None:
    async def work(by: Operator) -> None:
        with pytest.raises(CommandError) as caught:
            await by.send(command, payload)
        assert caught.value.code == code
        assert text in caught.value.text

    with_operator(mesh, work)


def cli(mesh: RunningMesh, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagemesh.shared.cli.main", "admin", *arguments]
    environ = {**os.environ, "PYTHONPATH": ".ns", "STAGEMESH_NATS__URL": str(mesh.record["nats"])}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_does_the_same(mesh: RunningMesh) -> None:
    table, whole = cli(mesh, "instance.list"), cli(mesh, "instance.list", "--json")
    assert (table.returncode, whole.returncode) == (0, 0), table.stderr + whole.stderr
    lines = table.stdout.splitlines()
    assert lines[0].split()[:3] == ["name", "role", "state"]
    assert ["decode-0", "decode", "serving"] in [line.split()[:3] for line in lines]
    assert {each["name"] for each in json.loads(whole.stdout)["instances"]} == {"prefill-0", "decode-0"}
    refused = cli(mesh, "instance.set", "decode-0", "max_running", "0")
    assert refused.returncode == 2
    assert "max_running: must be a whole number in 1..8" in refused.stderr


def test_who_watches_ends_when_nobody_reads_any_more(mesh: RunningMesh) -> None:
    command = [sys.executable, "-m", "stagemesh.shared.cli.main", "admin", "watch", "--nats", str(mesh.record["nats"])]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ".ns"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert watching.stderr.readline().startswith(b"listening to ")
        assert cli(mesh, "instance.drain", "prefill-0").returncode == 0
        assert b"drained" in watching.stdout.readline()
        watching.stdout.close()  # as `head -1` does
        assert cli(mesh, "instance.resume", "prefill-0").returncode == 0
        assert (watching.wait(timeout=30), watching.stderr.read()) == (1, b"")


def test_top_shows_the_mesh_as_it_runs(mesh: RunningMesh) -> None:
    async def look() -> str:
        async with Client(mesh.router, GENERATOR) as client, asyncio.TaskGroup() as group:
            running = group.create_task(generate(client, token_request(PROMPT, 3_000, ignore_eos=True)))
            command = [sys.executable, "-m", "stagemesh.shared.cli.main", "top", "--once", "--router", mesh.router]
            top = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
            said, _ = await top.communicate()
            assert top.returncode == 0
            running.cancel()
        return said.decode()

    lines = [line.split() for line in asyncio.run(look()).splitlines()]
    found = {line[0]: line for line in lines if line}
    assert found["decode-0"][1:3] == ["decode", "serving"]
    assert found["prefill-0"][1:3] == ["prefill", "serving"]
    assert {"prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1"} <= found.keys()
    assert lines[0][1:3] == ["tokens/s", "out,"]
    assert found["request"][1] == "age_s"
    asyncio.run(mesh.check_idle())


def test_commands_are_there_again_after_the_nats_server(mesh: RunningMesh) -> None:
    """Requests go on meanwhile. The broker has said what happened: nothing that it needs was lost."""
    pid = mesh.pids["nats"]
    os.kill(pid, signal.SIGKILL)

    async def answers() -> None:
        async with Client(mesh.router, GENERATOR) as client:
            assert len((await generate(client, token_request(PROMPT, 9, ignore_eos=True))).token_ids) == 9

    asyncio.run(answers())
    asyncio.run(mesh.until_back("nats"))

    async def work(by: Operator) -> None:
        reconnects = 0
        while not reconnects:  # the broker is on its way back, then the library's word for it
            with suppress(NoRespondersError):
                reconnects = (await by.call("mesh.status"))["nats"]["reconnects"]
        assert (await by.discover("PING"))["name"] == "stagemesh"

    with_operator(mesh, work)
