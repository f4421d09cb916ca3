"""Questions of operators to all routers, over the streams that they have opened.

ask --question to each--> ... --the last answer, or the deadline--> the answers
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stagemesh.shared.errors import Exhausted, ProtocolViolation
from stagemesh.shared.pb import broker_pb2

_Waiting = asyncio.Future[broker_pb2.RouterAnswer]
MAX_QUESTIONS = 100  # that one router has not answered


@dataclass(slots=True, eq=False)
class _Router:
    name: str
    questions: asyncio.Queue[broker_pb2.RouterQuestion] = field(default_factory=lambda: asyncio.Queue(MAX_QUESTIONS))
    asked: dict[int, _Waiting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answers:
    """`silent` are routers that have not answered in time, or have gone."""

    answers: tuple[broker_pb2.RouterAnswer, ...]
    silent: tuple[str, ...]


class Routers:
    """Those that attend."""

    def __init__(self) -> None:
        self._routers: set[_Router] = set()
        self._last_id = 0

    @property
    def names(self) -> list[str]:
        return sorted(router.name for router in self._routers)

    @property
    def num_asked(self) -> int:
        return sum(len(router.asked) for router in self._routers)

    async def serve(self, answers: AsyncIterator[broker_pb2.RouterAnswer], context: Any) -> None:
        """A router's stream, to its end."""
        first = await anext(answers, None)
        if first is None:
            return
        if not first.router:
            raise ProtocolViolation("a router that attends says its name first")
        router = _Router(first.router)
        self._routers.add(router)
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(_send(router, context))
                async for answer in answers:
                    waiting = router.asked.get(answer.id)
                    if waiting is not None and not waiting.done():  # else it comes too late
                        waiting.set_result(answer)
                sender.cancel()
        finally:
            self._routers.discard(router)
            for waiting in router.asked.values():
                waiting.cancel()

    async def ask(self, question: broker_pb2.RouterQuestion, timeout_s: float) -> Answers:
        """Every router. Raises Exhausted if one has too many questions to answer."""
        with self._asked(question) as asked:
            if asked:
                await asyncio.wait(asked.values(), timeout=timeout_s)
            came = [future.result() for future in asked.values() if future.done() and not future.cancelled()]
            names = {answer.router for answer in came}
            return Answers(tuple(came), tuple(sorted(router.name for router in asked if router.name not in names)))

    @contextmanager
    def _asked(self, question: broker_pb2.RouterQuestion) -> Iterator[dict[_Router, _Waiting]]:
        self._last_id += 1
        question.id = self._last_id
        asked: dict[_Router, _Waiting] = {}
        try:
            for router in self._routers:
                if router.questions.full():
                    raise Exhausted(f"{router.name} has {MAX_QUESTIONS} questions to answer")
                asked[router] = router.asked[question.id] = asyncio.get_running_loop().create_future()
                router.questions.put_nowait(question)
            yield asked
        finally:
            for router in asked:
                router.asked.pop(question.id, None)


async def _send(router: _Router, context: Any) -> None:
    while True:
        await context.write(await router.questions.get())
