"""Instances change their roles while requests come: none is lost, and the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stagemesh.shared.rpc.client import Client
from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.mesh.test_recovery import NEW_TOKENS, check_answers, mesh_of
from tests.support.admin import CommandError, Operator, operator
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
LIMIT_S = 200.0
SWITCHES = (("prefill-1", "decode"), ("prefill-1", "prefill"), ("decode-0", "prefill"), ("decode-0", "decode"))


class Load:
    """Requests one after the other, some at once, until told to stop."""

    def __init__(self, client: Client, wanted: list[list[int]]) -> None:
        self._client, self._wanted, self.asked = client, wanted, list[list[int]]()
        self.answers: list[Answer] = []
        self.stopped = False

    async def run(self) -> None:
        while not self.stopped:
            prompt = self._wanted[len(self.asked) % len(self._wanted)]
            self.asked.append(prompt)
            at = len(self.asked) - 1
            self.answers.append(Answer())
            self.answers[at] = await generate(self._client, token_request(prompt, NEW_TOKENS, ignore_eos=True))

    async def more(self, count: int) -> None:
        """Returns when so many more have come to their ends."""
        before = self.num_done
        while self.num_done < before + count:
            async with asyncio.timeout(LIMIT_S):
                await generate(self._client, token_request(self._wanted[0], 2, ignore_eos=True))

    @property
    def num_done(self) -> int:
        return sum(1 for answer in self.answers if answer.finished is not None)


async def roles(by: Operator) -> dict[str, str]:
    return {each["name"]: each["role"] for each in (await by.call("instance.list"))["instances"]}


async def switched(by: Operator, instance: str, role: str, load: Load) -> None:
    before = {each["name"]: each for each in (await by.call("instance.list"))["instances"]}
    said = await by.call("role.switch", instance=instance, role=role)
    assert (said["instance"], said["role"]) == (instance, role)
    assert said["epoch"] > before[instance]["epoch"]
    while (await roles(by)).get(instance) != role:
        pass  # each round asks the broker, which takes its time
    await load.more(8)


async def run(mesh: RunningMesh, wanted: list[list[int]]) -> Load:
    pids = mesh.pids
    async with Client(mesh.router, GENERATOR) as client, operator(str(mesh.record["nats"])) as by:
        load = Load(client, wanted)
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(load.run())
            await load.more(4)
            for instance, role in SWITCHES:
                await switched(by, instance, role, load)
            load.stopped = True
        mesh.read_record()
        assert mesh.pids == pids, "no process was started again"
        kinds = [e["event"] for e in (await by.call("events", limit=1000))["events"]]
        assert kinds.count("role_switched") == len(SWITCHES)
        assert "lost" not in kinds
        await by.call("instance.drain", instance="decode-1")
        for fields, text in (
            ({"instance": "prefill-0", "role": "prefill"}, "role: prefill-0 is a prefill instance already"),
            ({"instance": "decode-0", "role": "prefill"}, "instance: decode-0 is the only decode instance that serves"),
        ):
            with pytest.raises(CommandError) as caught:
                await by.call("role.switch", **fields)
            assert caught.value.text == text
    return load


def test_a_mesh_of_two_and_two_becomes_one_and_three_and_back_and_no_request_is_lost(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    reference = load_reference(model)
    wanted = prompts(12, reference.config.vocab_size)
    with mesh_of(tmp_path, model, 2) as mesh:
        load = asyncio.run(run(mesh, wanted))
        check_answers(reference, load.asked, load.answers)
        asyncio.run(mesh.check_idle())
