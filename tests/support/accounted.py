"""Requests that end in every way, with an account of what they must have cost a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from stagemesh.shared.engine.pages import pages_for
from stagemesh.shared.errors import Rejected
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate, token_request
from tests.support.running import RunningMesh

PAGE, CONTEXT = 8, 512
PROMPTS, NEW_TOKENS = (5, 31, 32, 64, 100), 12
FAR = 300  # tokens: those who ask for them are not through when something is done to them


def prompt(length: int) -> list[int]:
    return [4 + (7 * length + index) % 300 for index in range(length)]


def sets_after_three(event: asyncio.Event) -> Callable[[Answer], bool]:
    """Sets `event` once there are three tokens: the first is prefill's, the others came from decode steps."""

    def took(answer: Answer) -> bool:
        if len(answer.token_ids) >= 3:
            event.set()
        return True

    return took


class Work:
    """Requests that end in every way, and what they must have cost. One is text, one asks for a single token."""

    TEXT = "The river runs past the old mill."

    async def run(self, mesh: RunningMesh) -> None:
        async with Client(mesh.router, GENERATOR) as client:
            whole = [token_request(prompt(length), NEW_TOKENS, ignore_eos=True) for length in PROMPTS]
            text = generator_pb2.GenerateRequest(text=self.TEXT, max_tokens=NEW_TOKENS, ignore_eos=True)
            single = token_request(prompt(9), 1, ignore_eos=True)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate(client, request)) for request in (*whole, text, single)]
                aborted = group.create_task(self._abort(client, prompt(40)))
                group.create_task(self._reject(client))
        self.answers = [task.result() for task in tasks]
        self.aborted = aborted.result()

    async def _abort(self, client: Client, token_ids: list[int]) -> Answer:
        """Once decode steps have run: its KV has been sent by then."""
        enough = asyncio.Event()
        request = token_request(token_ids, FAR, ignore_eos=True, request_id="to-abort")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generate(client, request, on_response=sets_after_three(enough)))
            await enough.wait()
            await client.call("Abort", generator_pb2.AbortRequest(request_id="to-abort"), timeout_s=30)
        return task.result()

    async def _reject(self, client: Client) -> None:
        with pytest.raises(Rejected, match="max_tokens"):
            await generate(client, token_request(prompt(8), CONTEXT + 1))

    @property
    def prompt_lengths(self) -> list[int]:
        """Of those whose KV was sent: all but the one that asked for a single token."""
        text_length = self._finished(self.answers[len(PROMPTS)]).usage.prompt_tokens
        return [*PROMPTS, text_length, 40]

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths) + 9

    @property
    def generated_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in (*self.answers, self.aborted))

    @property
    def kv_pages(self) -> int:
        return sum(pages_for(length, PAGE) for length in self.prompt_lengths)

    @staticmethod
    def _finished(answer: Answer) -> generator_pb2.Finished:
        assert answer.finished is not None
        return answer.finished
