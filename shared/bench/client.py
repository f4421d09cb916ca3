"""One client process's share of a load: sends requests when they arrive and writes down what comes back.

arrival --slot is free--> sent --messages--> ended: a record, whatever the end was
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence

from stagemesh.shared.bench.frames import Load, Progress
from stagemesh.shared.bench.records import RequestRecord, failure_of
from stagemesh.shared.bench.workload import PlannedRequest, share
from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client

GENERATOR = generator_pb2.DESCRIPTOR.services_by_name["Generator"]


class LoadClient:
    """Follows its requests on one channel. `planned` are in order of arrival."""

    def __init__(self, client: Client, load: Load, process: int, planned: Sequence[PlannedRequest]) -> None:
        self._client, self._timeout_s, self._planned = client, load.timeout_s, planned
        self._requests = {request.index: _message(request) for request in planned}
        limit = load.max_concurrency
        self._slots = asyncio.Semaphore(len(planned) if limit is None else share(limit, process, load.num_processes))
        self._records: list[RequestRecord] = []
        self._tokens = self._failed = 0
        self._start_s = 0.0

    @property
    def progress(self) -> Progress:
        return Progress(len(self._records), self._failed, self._tokens)

    async def run(self, start_s: float) -> tuple[RequestRecord, ...]:
        """Sends every request at its arrival after `start_s` (CLOCK_MONOTONIC) or, while there is no slot, later; in
        order. Returns when all have ended."""
        self._start_s = start_s
        async with asyncio.TaskGroup() as group:
            for request in self._planned:
                await self._wait_until(request.arrival_s)
                await self._slots.acquire()
                group.create_task(self._follow(request))
        return tuple(self._records)

    async def _wait_until(self, at_s: float) -> None:
        """Gives way also where nothing is to be waited for: a burst must not keep the loop from those already sent."""
        await asyncio.sleep(0)
        while (left_s := at_s - self._now_s()) > 0.0:  # noqa: ASYNC110 - a timer may be a millisecond early
            await asyncio.sleep(left_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _follow(self, request: PlannedRequest) -> None:
        sent_s = self._now_s()
        times_s, counts, failure = array("d"), array("q"), "the stream ended without its last message"
        cached_tokens = 0
        try:
            message = self._requests.pop(request.index)
            async for response in self._client.receive("Generate", message, timeout_s=self._timeout_s):
                if count := len(response.token_ids):
                    times_s.append(self._now_s())
                    counts.append(count)
                    self._tokens += count
                if response.HasField("finished"):
                    failure = _failure(request, response.finished, sum(counts))
                    cached_tokens = response.finished.usage.cached_tokens
        except StagemeshError as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._slots.release()
        self._failed += bool(failure)
        self._records.append(
            RequestRecord(
                index=request.index,
                input_tokens=len(request.token_ids),
                wanted_tokens=request.output_tokens,
                arrival_s=request.arrival_s,
                sent_s=sent_s,
                end_s=self._now_s(),
                message_s=tuple(times_s),
                message_tokens=tuple(counts),
                failure=failure,
                cached_tokens=cached_tokens,
            )
        )


def _message(request: PlannedRequest) -> generator_pb2.GenerateRequest:
    message = generator_pb2.GenerateRequest(max_tokens=request.output_tokens, ignore_eos=True)
    message.token_ids.ids.extend(request.token_ids.tolist())
    return message


def _failure(request: PlannedRequest, finished: generator_pb2.Finished, received: int) -> str:
    name = generator_pb2.FinishReason.Name(finished.finish_reason)
    return failure_of(
        finish_reason=name.removeprefix("FINISH_REASON_").lower(),
        received=received,
        wanted=request.output_tokens,
        reported=finished.usage.completion_tokens,
        input_tokens=len(request.token_ids),
        reported_input=finished.usage.prompt_tokens,
    )
