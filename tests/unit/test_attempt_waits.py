"""How long a request waits for instances: for drained ones until they are taken back, for others not long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagemesh.services.router import attempt as attempt_module
from stagemesh.services.router.attempt import Attempt, Wanted
from stagemesh.services.router.placement import Drained, Placement
from stagemesh.shared.core.identity import InstanceRef, RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.errors import Retryable
from tests.support.instances import PREFILL, instance_of

LIMIT_S = 30.0
FOUND = Placement(instance_of("p", PREFILL), None)


class Mesh:
    """Says `answers`, one after the other, the last one for good."""

    def __init__(self, *answers: Placement | Exception) -> None:
        self.answers, self.changed, self.asked = list(answers), asyncio.Event(), 0

    def place(self, *what: Any) -> Placement:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def placed(mesh: Mesh, lost_on: frozenset[InstanceRef] = frozenset()) -> Placement:
    wanted = Wanted("r", SamplingParams(max_tokens=4), [1, 2], lost_on=lost_on)
    async with asyncio.timeout(LIMIT_S):
        return await Attempt(RequestRef("r", 1), wanted, cast("Any", SimpleNamespace()))._place(cast("Any", mesh))


@pytest.mark.parametrize("lost_on", [frozenset(), frozenset({InstanceRef("p", 1)})], ids=["first", "again"])
def test_those_that_are_drained_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, lost_on: frozenset[InstanceRef]
) -> None:
    monkeypatch.setattr(attempt_module, "PLACEMENT_WAIT_S", 0.01)

    async def run() -> None:
        mesh = Mesh(*[Drained("no prefill instance takes new requests")] * 20, FOUND)
        assert await placed(mesh, lost_on) == FOUND
        assert mesh.asked == 21

    asyncio.run(run())


def test_those_that_are_not_there_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "PLACEMENT_WAIT_S", 0.01)

    async def run() -> None:
        with pytest.raises(Retryable, match="is there to take"):
            await placed(Mesh(Drained("it drains"), Retryable("no prefill instance is there to take the request")))

    asyncio.run(run())
