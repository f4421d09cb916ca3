"""Instances that change their roles while requests come."""

from __future__ import annotations

import asyncio

from stagemesh.shared.rpc.client import Client
from tests.support.admin import Operator
from tests.support.client import Answer, generate, token_request

LIMIT_S = 200.0


class Load:
    """Requests one after the other, some at once, until told to stop."""

    def __init__(self, client: Client, wanted: list[list[int]], new_tokens: int) -> None:
        self._client, self._wanted, self._new_tokens = client, wanted, new_tokens
        self.asked: list[list[int]] = []
        self.answers: list[Answer] = []
        self.stopped = False

    async def run(self) -> None:
        while not self.stopped:
            prompt = self._wanted[len(self.asked) % len(self._wanted)]
            self.asked.append(prompt)
            at = len(self.asked) - 1
            self.answers.append(Answer())
            self.answers[at] = await generate(self._client, token_request(prompt, self._new_tokens, ignore_eos=True))

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
    """Of every instance, by its name."""
    return {each["name"]: each["role"] for each in (await by.call("instance.list"))["instances"]}


async def switched(by: Operator, instance: str, role: str, load: Load) -> None:
    """Returns when it has the role, the router knows, and some requests more have come to their ends."""
    before = {each["name"]: each for each in (await by.call("instance.list"))["instances"]}
    said = await by.call("role.switch", instance=instance, role=role)
    assert (said["instance"], said["role"]) == (instance, role)
    assert said["epoch"] > before[instance]["epoch"]
    while (await roles(by)).get(instance) != role:
        pass  # each round asks the broker, which takes its time
    await load.more(8)
