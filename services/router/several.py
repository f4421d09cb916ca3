"""Requests for several answers: each answer is a request of its own, under a name that no client can give."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.pb import generator_pb2

MASK_64 = (1 << 64) - 1


class Prompt:
    """The prompt's token ids, which are made once for all answers: by the first that asks and is not cancelled."""

    def __init__(self, tokenize: Callable[[], Awaitable[list[int]]]) -> None:
        self._tokenize, self._lock = tokenize, asyncio.Lock()
        self._token_ids: list[int] | None = None

    async def token_ids(self) -> list[int]:
        async with self._lock:
            if self._token_ids is None:
                self._token_ids = await self._tokenize()
            return self._token_ids


class Admission:
    """Whether a request may come in: decided once, by the first of its answers, and then the same for all."""

    def __init__(self) -> None:
        self._is_decided = False
        self._error: Exception | None = None

    def decide(self, check: Callable[[], None]) -> None:
        """Raises what `check` raises, or raised when it was called for another answer."""
        if not self._is_decided:
            self._is_decided = True
            try:
                check()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class Part:
    """Answer `index` of `count` to the request of a client; `seed` is for a request that gives none."""

    request: generator_pb2.GenerateRequest
    request_id: str
    index: int
    count: int
    seed: int
    prompt: Prompt
    admission: Admission

    @property
    def name(self) -> str:
        return self.request_id if self.count == 1 else f"{self.request_id}#{self.index}"

    def own(self, sampling: SamplingParams) -> SamplingParams:
        """Its parameters, from those of the request: a seed of its own; the first answer alone tells of the prompt."""
        seed = (sampling.seed + self.index) & MASK_64
        return replace(sampling, seed=seed, prompt_logprobs=None if self.index else sampling.prompt_logprobs)


class Groups:
    """The parts of each live request for several answers."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Part]] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._parts

    @contextmanager
    def group(self, request_id: str, parts: list[Part]) -> Iterator[None]:
        self._parts[request_id] = parts
        try:
            yield
        finally:
            del self._parts[request_id]

    def of_another(self, part: Part) -> bool:
        """Whether its request's id is that of another one, for several answers. One of them may have ended."""
        own = self._parts.get(part.request_id)
        return own is not None and not any(part is each for each in own)

    def names(self, request_id: str) -> tuple[str, ...]:
        """Of its parts; its own where it is one."""
        parts = self._parts.get(request_id)
        return (request_id,) if parts is None else tuple(part.name for part in parts)


class Total:
    """The usage of all answers together."""

    def __init__(self, count: int) -> None:
        self._left, self._usage = count, generator_pb2.Usage()

    def add(self, response: generator_pb2.GenerateResponse) -> None:
        """Adds the usage of an answer that ends with `response`; the last one of all tells the sum."""
        if not response.HasField("finished"):
            return
        usage, self._left = response.finished.usage, self._left - 1
        self._usage.prompt_tokens = usage.prompt_tokens
        self._usage.completion_tokens += usage.completion_tokens
        self._usage.cached_tokens = max(self._usage.cached_tokens, usage.cached_tokens)
        if not self._left:
            response.finished.total_usage.CopyFrom(self._usage)
